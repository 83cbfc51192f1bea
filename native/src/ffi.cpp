// The entry points that `jax.ffi` registers: check the buffers, and pass them to the kernels.
#include <algorithm>
#include <array>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace twinscan {
namespace {

namespace ffi = xla::ffi;
using Shape = std::initializer_list<int64_t>;

// Calls `run` with an empty call for the type of an array.
template <template <typename> class Call, typename Run>
ffi::Error with_type_of(const ffi::AnyBuffer& array, Run run) {
  try {
    if (array.element_type() == ffi::F32) return run(Call<float>());
    if (array.element_type() == ffi::F64) return run(Call<double>());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the arrays of the kernel");
  }
  return ffi::Error::InvalidArgument("expected float32 or float64 arrays");
}

// Takes the buffers of a call one after the other. Remembers the first error.
template <typename T>
class Buffers {
 public:
  Buffers(ffi::RemainingArgs arguments, ffi::RemainingRets results)
      : arguments_(arguments), results_(results) {}

  // Returns the sizes of an argument as an array with this many dimensions.
  std::vector<int64_t> sizes(size_t index, size_t dimensions) {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(index);
    if (buffer && buffer->dimensions().size() >= dimensions) return merged(*buffer, dimensions);
    check(false, "expected more dimensions of the arguments");
    return std::vector<int64_t>(dimensions);
  }

  const T* argument(const char* name, Shape shape) { return argument<T>(name, shape); }

  template <typename U>
  const U* argument(const char* name, Shape shape) {
    auto buffer = arguments_.get<ffi::AnyBuffer>(argument_++);
    return buffer ? data<U>(name, *buffer, shape) : fail<U>(buffer.error());
  }

  T* result(const char* name, Shape shape) {
    auto buffer = results_.get<ffi::AnyBuffer>(result_++);
    return buffer ? data<T>(name, **buffer, shape) : fail<T>(buffer.error());
  }

  // Takes an array for each direction.
  Arrays<const T> arguments(const char* name, int64_t directions, Shape shape) {
    Arrays<const T> arrays{};
    for (int64_t d = 0; d < directions; ++d) arrays[d] = argument(name, shape);
    return arrays;
  }

  Arrays<T> results(const char* name, int64_t directions, Shape shape) {
    Arrays<T> arrays{};
    for (int64_t d = 0; d < directions; ++d) arrays[d] = result(name, shape);
    return arrays;
  }

  // Takes `lengths` and `reset`, which has size 0 where no state restarts.
  void rows(Scan<T>& scan) {
    scan.lengths = argument<int32_t>("lengths", {scan.batch});
    auto reset = arguments_.get<ffi::AnyBuffer>(argument_);
    if (reset && reset->element_count() == 0) {
      ++argument_;
    } else {
      scan.reset = argument<bool>("reset", {scan.directions, scan.batch, scan.time});
    }
  }

  void check(bool holds, const char* expected) {
    if (!holds) fail<T>(ffi::Error::InvalidArgument(expected));
  }

  // Returns the first error, also if the call has further arguments or results.
  ffi::Error error() {
    check(argument_ >= arguments_.size() && result_ >= results_.size(),
          "expected fewer arguments or results");
    return error_;
  }

 private:
  template <typename U>
  U* data(const char* name, ffi::AnyBuffer buffer, Shape shape) {
    constexpr auto type = std::is_same_v<U, float>     ? ffi::F32
                          : std::is_same_v<U, double>  ? ffi::F64
                          : std::is_same_v<U, int32_t> ? ffi::S32
                                                       : ffi::PRED;
    const auto sizes = merged(buffer, shape.size());
    if (!std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end())) {
      return fail<U>(ffi::Error::InvalidArgument(std::string(name) + ": expected shape " + text(shape) +
                                                 ", got " + text(buffer.dimensions())));
    }
    if (buffer.element_type() != type) {
      return fail<U>(ffi::Error::InvalidArgument(
          std::string(name) + ": expected the type of the other arrays, int32 lengths and bool reset"));
    }
    return static_cast<U*>(buffer.untyped_data());
  }

  // The sizes of an array. `vmap` adds axes before the first one, which are rows, too.
  static std::vector<int64_t> merged(const ffi::AnyBuffer& array, size_t dimensions) {
    const auto got = array.dimensions();
    std::vector<int64_t> sizes(got.begin(), got.end());
    while (sizes.size() > dimensions) {
      sizes[1] *= sizes[0];
      sizes.erase(sizes.begin());
    }
    return sizes;
  }

  template <typename U>
  U* fail(ffi::Error error) {
    if (error_.success()) error_ = error;
    return nullptr;
  }

  template <typename Sizes>
  static std::string text(const Sizes& sizes) {
    std::string joined;
    for (int64_t size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
    return "(" + joined + ")";
  }

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t argument_ = 0, result_ = 0;
  ffi::Error error_;
};

template <typename T>
ffi::Error forward(Cell cell, Forward<T> call, bool keep, Buffers<T> buffers) {
  const int64_t d = call.directions, b = call.batch, t = call.time, n = call.hidden;
  const int64_t gates = gates_of(cell) * n;
  const bool lstm = cell == Cell::kLstm, gru = cell == Cell::kGru;
  call.x = buffers.argument("x", {b, t, call.inputs});
  call.kernel_x = buffers.argument("kernel_x", {d, call.inputs, gates});
  call.bias = buffers.argument("bias", {d, gates});
  call.kernel = buffers.argument("kernel", {d, n, gates});
  if (gru) call.bias_hn = buffers.argument("bias_hn", {d, n});
  call.h0 = buffers.argument("h0", {d, b, n});
  if (lstm) call.c0 = buffers.argument("c0", {d, b, n});
  buffers.rows(call);
  call.y = buffers.result("y", {b, t, d * n});
  call.h = buffers.result("h", {d, b, n});
  if (lstm) call.c = buffers.result("c", {d, b, n});
  if (keep && (lstm || gru)) call.gates = buffers.results("gates", d, {b, t, gates});
  if (keep && lstm) call.cells = buffers.results("cells", d, {b, t, n});
  if (keep && gru) call.n_h = buffers.results("n_h", d, {b, t, n});
  ffi::Error error = buffers.error();
  if (error.success()) kernels<T>().forward(cell, call);
  return error;
}

template <typename T>
ffi::Error backward(Cell cell, Backward<T> call, Buffers<T> buffers) {
  const int64_t d = call.directions, b = call.batch, t = call.time, n = call.hidden;
  const int64_t gates = gates_of(cell) * n;
  const bool lstm = cell == Cell::kLstm, gru = cell == Cell::kGru;
  call.dy = buffers.argument("dy", {b, t, d * n});
  call.dh = buffers.argument("dh", {d, b, n});
  if (lstm) call.dc = buffers.argument("dc", {d, b, n});
  call.kernel = buffers.argument("kernel", {d, n, gates});
  call.y = buffers.argument("y", {b, t, d * n});
  call.h0 = buffers.argument("h0", {d, b, n});
  if (lstm) call.c0 = buffers.argument("c0", {d, b, n});
  if (lstm || gru) call.gates = buffers.arguments("gates", d, {b, t, gates});
  if (lstm) call.cells = buffers.arguments("cells", d, {b, t, n});
  if (gru) call.n_h = buffers.arguments("n_h", d, {b, t, n});
  buffers.rows(call);
  call.dgates_x = buffers.results("dgates_x", d, {b, t, gates});
  if (gru) call.dn_h = buffers.results("dn_h", d, {b, t, n});
  call.dh0 = buffers.result("dh0", {d, b, n});
  if (lstm) call.dc0 = buffers.result("dc0", {d, b, n});
  ffi::Error error = buffers.error();
  if (error.success()) kernels<T>().backward(cell, call);
  return error;
}

// Reads the sizes from the first argument, which has shape (B, T, ·), and a state of shape (D, B, H).
template <template <typename> class Call>
ffi::Error run(Cell cell, bool relu, bool keep, int64_t reverse, ffi::RemainingArgs arguments,
               ffi::RemainingRets results) {
  constexpr bool is_forward = std::is_same_v<Call<float>, Forward<float>>;
  const auto first = arguments.get<ffi::AnyBuffer>(0);
  const auto state = arguments.get<ffi::AnyBuffer>(!is_forward ? 1 : cell == Cell::kGru ? 5 : 4);
  if (!first || !state || first->dimensions().size() != 3 || state->dimensions().size() != 3) {
    return ffi::Error::InvalidArgument("expected sequences and states with 3 dimensions");
  }
  if (const int64_t d = state->dimensions()[0]; d < 1 || d > kMostDirections) {
    return ffi::Error::InvalidArgument("expected one direction or two");
  }
  return with_type_of<Call>(*first, [&](auto call) {
    call.batch = first->dimensions()[0];
    call.time = first->dimensions()[1];
    call.directions = state->dimensions()[0];
    call.hidden = state->dimensions()[2];
    call.reverse = static_cast<uint64_t>(reverse);
    call.relu = relu;
    if constexpr (is_forward) {
      call.inputs = first->dimensions()[2];
      return forward(cell, call, keep, {arguments, results});
    } else {
      return backward(cell, call, {arguments, results});
    }
  });
}

template <Cell cell>
ffi::Error run_forward(ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t reverse,
                       bool keep) {
  return run<Forward>(cell, false, keep, reverse, arguments, results);
}

template <Cell cell>
ffi::Error run_backward(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        int64_t reverse) {
  return run<Backward>(cell, false, false, reverse, arguments, results);
}

// An RNN has no residuals beyond its output, so `keep` changes nothing.
ffi::Error run_rnn_forward(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                           int64_t reverse, bool relu, bool keep) {
  return run<Forward>(Cell::kRnn, relu, keep, reverse, arguments, results);
}

ffi::Error run_rnn_backward(ffi::RemainingArgs arguments, ffi::RemainingRets results,
                            int64_t reverse, bool relu) {
  return run<Backward>(Cell::kRnn, relu, false, reverse, arguments, results);
}

// Each `take` takes the buffers of a call of one operator. Those that both passes share come first, and
// give the sizes.
template <typename T>
auto take_shared(Attention<T>& call, Buffers<T>& buffers) {
  const auto of_q = buffers.sizes(0, 4), of_v = buffers.sizes(2, 4);
  const int64_t b = call.batch = of_q[0], t = call.time = of_q[1];
  const int64_t h = call.heads = of_q[2], d = call.features = of_q[3];
  const int64_t n = call.kv_heads = of_v[2], e = call.values = of_v[3];
  call.q = buffers.argument("q", {b, t, h, d});
  call.k = buffers.argument("k", {b, t, n, d});
  call.v = buffers.argument("v", {b, t, n, e});
  call.first = buffers.template argument<int32_t>("first", {b, t});
  return std::array{b, t, h, d, e};
}

template <typename T>
void take(AttentionForward<T>& call, Buffers<T>& buffers) {
  const auto [b, t, h, d, e] = take_shared(call, buffers);
  call.y = buffers.result("y", {b, t, h, e});
  call.log_sum = buffers.result("log_sum", {b, h, t});
}

template <typename T>
void take(AttentionBackward<T>& call, Buffers<T>& buffers) {
  const auto [b, t, h, d, e] = take_shared(call, buffers);
  call.dy = buffers.argument("dy", {b, t, h, e});
  call.y = buffers.argument("y", {b, t, h, e});
  call.log_sum = buffers.argument("log_sum", {b, h, t});
  call.dq = buffers.result("dq", {b, t, h, d});
  call.dk = buffers.result("dk", {b, t, h, d});
  call.dv = buffers.result("dv", {b, t, h, e});
}

template <typename T>
auto take_shared(LinearAttention<T>& call, Buffers<T>& buffers, int64_t parts) {
  const auto of_q = buffers.sizes(0, 4), of_v = buffers.sizes(2, 4);
  const int64_t b = call.batch = of_q[0], t = call.time = of_q[1];
  const int64_t n = call.key_heads = of_q[2], d = call.features = of_q[3];
  const int64_t h = call.heads = of_v[2], e = call.values = of_v[3];
  const int64_t chunks = (t + kLinearAttentionChunk - 1) / kLinearAttentionChunk;
  buffers.check(n > 0 && h % n == 0 && parts > 0 && parts <= h / n,
                "expected heads that can be divided among key heads and parts");
  call.parts = parts;
  call.q = buffers.argument("q", {b, t, n, d});
  call.k = buffers.argument("k", {b, t, n, d});
  call.v = buffers.argument("v", {b, t, h, e});
  call.log_decay = buffers.argument("log_decay", {b, t, h});
  return std::array{b, t, n, d, h, e, chunks};
}

// Without `keep`, the forward kernels do not return the states before the chunks.
template <typename T>
void take(LinearAttentionForward<T>& call, Buffers<T>& buffers, int64_t parts, bool keep) {
  const auto [b, t, n, d, h, e, chunks] = take_shared(call, buffers, parts);
  call.state = buffers.argument("state", {b, h, e, d});
  call.y = buffers.result("y", {b, t, h, e});
  call.last = buffers.result("last", {b, h, e, d});
  if (keep) call.before = buffers.result("before", {b, chunks, h, d, e});
}

template <typename T>
void take(LinearAttentionBackward<T>& call, Buffers<T>& buffers, int64_t parts) {
  const auto [b, t, n, d, h, e, chunks] = take_shared(call, buffers, parts);
  call.before = buffers.argument("before", {b, chunks, h, d, e});
  call.dy = buffers.argument("dy", {b, t, h, e});
  call.dlast = buffers.argument("dlast", {b, h, e, d});
  call.dq = buffers.result("dq", {b, parts, t, n, d});
  call.dk = buffers.result("dk", {b, parts, t, n, d});
  call.dv = buffers.result("dv", {b, t, h, e});
  call.dlog_decay = buffers.result("dlog_decay", {b, t, h});
  call.dstate = buffers.result("dstate", {b, h, e, d});
}

template <typename T>
auto take_shared(SelectiveScan<T>& call, Buffers<T>& buffers, int64_t parts) {
  const auto of_u = buffers.sizes(0, 3), of_B = buffers.sizes(3, 3);
  const int64_t b = call.batch = of_u[0], t = call.time = of_u[1];
  const int64_t f = call.features = of_u[2], n = call.states = of_B[2];
  const int64_t chunks = (t + kSelectiveScanChunk - 1) / kSelectiveScanChunk;
  buffers.check(parts > 0, "expected at least one part");
  call.parts = parts;
  call.u = buffers.argument("u", {b, t, f});
  call.dt = buffers.argument("dt", {b, t, f});
  call.A = buffers.argument("A", {b, n, f});
  call.B = buffers.argument("B", {b, t, n});
  call.C = buffers.argument("C", {b, t, n});
  call.reset = buffers.template argument<bool>("reset", {b, t});
  return std::array{b, t, f, n, chunks};
}

template <typename T>
void take(SelectiveScanForward<T>& call, Buffers<T>& buffers, int64_t parts, bool keep) {
  const auto [b, t, f, n, chunks] = take_shared(call, buffers, parts);
  call.state = buffers.argument("state", {b, n, f});
  call.y = buffers.result("y", {b, t, f});
  call.last = buffers.result("last", {b, n, f});
  if (keep) call.before = buffers.result("before", {b, chunks, n, f});
}

template <typename T>
void take(SelectiveScanBackward<T>& call, Buffers<T>& buffers, int64_t parts) {
  const auto [b, t, f, n, chunks] = take_shared(call, buffers, parts);
  call.before = buffers.argument("before", {b, chunks, n, f});
  call.dy = buffers.argument("dy", {b, t, f});
  call.dlast = buffers.argument("dlast", {b, n, f});
  call.du = buffers.result("du", {b, t, f});
  call.ddt = buffers.result("ddt", {b, t, f});
  call.dA = buffers.result("dA", {b, n, f});
  call.dB = buffers.result("dB", {b, parts, t, n});
  call.dC = buffers.result("dC", {b, parts, t, n});
  call.dstate = buffers.result("dstate", {b, n, f});
}

// Runs an operator. Its first argument has the type of the others.
template <template <typename> class CallOf>
constexpr auto run_operator = [](ffi::RemainingArgs arguments, ffi::RemainingRets results,
                                 auto... attributes) {
  const auto first = arguments.get<ffi::AnyBuffer>(0);
  if (!first) return first.error();
  return with_type_of<CallOf>(*first, [&](auto call) {
    using Call = decltype(call);
    using T = typename Call::Real;
    Buffers<T> buffers(arguments, results);
    take(call, buffers, attributes...);
    ffi::Error error = buffers.error();
    if (error.success()) std::get<Kernel<Call>>(kernels<T>().operators)(call);
    return error;
  });
};

}  // namespace
}  // namespace twinscan

#define TWINSCAN_EXPORT(symbol, function, attributes)                                            \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*);   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                                 \
      symbol, twinscan::function,                                                                \
      twinscan::ffi::Ffi::Bind().RemainingArgs().RemainingRets() attributes)

TWINSCAN_EXPORT(twinscan_lstm_forward, run_forward<twinscan::Cell::kLstm>,
                .Attr<int64_t>("reverse").Attr<bool>("keep"));
TWINSCAN_EXPORT(twinscan_gru_forward, run_forward<twinscan::Cell::kGru>,
                .Attr<int64_t>("reverse").Attr<bool>("keep"));
TWINSCAN_EXPORT(twinscan_rnn_forward, run_rnn_forward,
                .Attr<int64_t>("reverse").Attr<bool>("relu").Attr<bool>("keep"));
TWINSCAN_EXPORT(twinscan_lstm_backward, run_backward<twinscan::Cell::kLstm>,
                .Attr<int64_t>("reverse"));
TWINSCAN_EXPORT(twinscan_gru_backward, run_backward<twinscan::Cell::kGru>,
                .Attr<int64_t>("reverse"));
TWINSCAN_EXPORT(twinscan_rnn_backward, run_rnn_backward,
                .Attr<int64_t>("reverse").Attr<bool>("relu"));
TWINSCAN_EXPORT(twinscan_attention_forward, run_operator<twinscan::AttentionForward>, );
TWINSCAN_EXPORT(twinscan_attention_backward, run_operator<twinscan::AttentionBackward>, );
TWINSCAN_EXPORT(twinscan_linear_attention_forward, run_operator<twinscan::LinearAttentionForward>,
                .Attr<int64_t>("parts").Attr<bool>("keep"));
TWINSCAN_EXPORT(twinscan_linear_attention_backward, run_operator<twinscan::LinearAttentionBackward>,
                .Attr<int64_t>("parts"));
TWINSCAN_EXPORT(twinscan_selective_scan_forward, run_operator<twinscan::SelectiveScanForward>,
                .Attr<int64_t>("parts").Attr<bool>("keep"));
TWINSCAN_EXPORT(twinscan_selective_scan_backward, run_operator<twinscan::SelectiveScanBackward>,
                .Attr<int64_t>("parts"));

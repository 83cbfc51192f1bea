// The arguments and results of the kernels, as plain pointers and sizes.
//
// D directions, B rows, T steps, I inputs, H hidden units and G gates. All arrays are row-major.
// Direction d has columns [d·H, (d+1)·H) of the outputs. The residuals and the gradients of the
// gates have one array per direction, so that XLA can multiply each without copying it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>

namespace twinscan {

enum class Cell { kLstm, kGru, kRnn };

constexpr int kMostDirections = 2;

constexpr int gates_of(Cell cell) { return cell == Cell::kLstm ? 4 : cell == Cell::kGru ? 3 : 1; }

// One array for each direction.
template <typename T>
using Arrays = std::array<T*, kMostDirections>;

// What a forward and a backward call have in common.
template <typename T>
struct Scan {
  int64_t directions = 0, batch = 0, time = 0, inputs = 0, hidden = 0;
  uint64_t reverse = 0;  // bit d is set if direction d runs from the last step to the first
  bool relu = false;     // an RNN with max(·, 0) in place of tanh

  const T* kernel = nullptr;         // (D, H, G·H)
  const T* h0 = nullptr;             // (D, B, H)
  const T* c0 = nullptr;             // (D, B, H), LSTM
  const int32_t* lengths = nullptr;  // (B): row b has the steps t < lengths[b]
  const bool* reset = nullptr;       // (D, B, T): the state restarts before step t; or null

  bool reversed(int64_t d) const { return reverse >> d & 1; }
  bool active(int64_t b, int64_t t) const { return t < lengths[b]; }
  // Whether row b begins at step t. In reverse, it begins at its last step that is not padding.
  bool first(int64_t d, int64_t b, int64_t t) const {
    return reversed(d) ? t + 1 >= std::min<int64_t>(lengths[b], time) : t == 0;
  }
  bool restarts(int64_t d, int64_t b, int64_t t) const {
    return reset != nullptr && active(b, t) && reset[(d * batch + b) * time + t];
  }
};

template <typename T>
struct Forward : Scan<T> {
  const T* x = nullptr;         // (B, T, I)
  const T* kernel_x = nullptr;  // (D, I, G·H)
  const T* bias = nullptr;      // (D, G·H): the sum of each gate's biases, without b_hn
  const T* bias_hn = nullptr;   // (D, H), GRU

  T* y = nullptr;  // (B, T, D·H)
  T* h = nullptr;  // (D, B, H)
  T* c = nullptr;  // (D, B, H), LSTM
  // The residuals. Null where no gradient is asked for.
  Arrays<T> gates{};  // (B, T, G·H): the gates after their activation, LSTM and GRU
  Arrays<T> cells{};  // (B, T, H): c_t, LSTM
  Arrays<T> n_h{};    // (B, T, H): h_{t−1} W_hn + b_hn, GRU
};

template <typename T>
struct Backward : Scan<T> {
  const T* dy = nullptr;     // (B, T, D·H)
  const T* dh = nullptr;     // (D, B, H)
  const T* dc = nullptr;     // (D, B, H), LSTM
  const T* y = nullptr;      // (B, T, D·H), GRU and RNN
  Arrays<const T> gates{};   // (B, T, G·H), LSTM and GRU
  Arrays<const T> cells{};   // (B, T, H), LSTM
  Arrays<const T> n_h{};     // (B, T, H), GRU

  // dgates_x may be the same arrays as gates, and dn_h the same as n_h.
  Arrays<T> dgates_x{};  // (B, T, G·H)
  Arrays<T> dn_h{};      // (B, T, H), GRU
  T* dh0 = nullptr;      // (D, B, H)
  T* dc0 = nullptr;      // (D, B, H), LSTM
};

// Attention with B rows, T steps, H heads of queries, K heads of keys and values, D features of a key
// and E of a value.
template <typename T>
struct Attention {
  using Real = T;
  int64_t batch = 0, time = 0, heads = 0, kv_heads = 0, features = 0, values = 0;

  const T* q = nullptr;            // (B, T, H, D)
  const T* k = nullptr;            // (B, T, K, D)
  const T* v = nullptr;            // (B, T, K, E)
  const int32_t* first = nullptr;  // (B, T): step t sees the steps first[t] … t
};

template <typename T>
struct AttentionForward : Attention<T> {
  static constexpr bool kForward = true;
  T* y = nullptr;        // (B, T, H, E)
  T* log_sum = nullptr;  // (B, H, T): the logarithm of the sum of the exponentials of the scores
};

template <typename T>
struct AttentionBackward : Attention<T> {
  static constexpr bool kForward = false;
  const T* dy = nullptr;       // (B, T, H, E)
  const T* y = nullptr;        // (B, T, H, E)
  const T* log_sum = nullptr;  // (B, H, T)

  T* dq = nullptr;  // (B, T, H, D)
  T* dk = nullptr;  // (B, T, H, D): the part of each head of queries
  T* dv = nullptr;  // (B, T, H, E)
};

// The number of steps that linear attention computes at once.
constexpr int64_t kLinearAttentionChunk = 64;

// Linear attention with B rows, T steps in C chunks, H heads of values, K heads of queries and keys, D
// features of a key and E of a value. Head h of the values reads key head h K / H.
template <typename T>
struct LinearAttention {
  using Real = T;
  int64_t batch = 0, time = 0, heads = 0, key_heads = 0, features = 0, values = 0;
  int64_t parts = 1;  // into which the heads of values that share a key head are divided

  const T* q = nullptr;          // (B, T, K, D)
  const T* k = nullptr;          // (B, T, K, D)
  const T* v = nullptr;          // (B, T, H, E)
  const T* log_decay = nullptr;  // (B, T, H)
};

template <typename T>
struct LinearAttentionForward : LinearAttention<T> {
  const T* state = nullptr;  // (B, H, E, D)

  T* y = nullptr;       // (B, T, H, E)
  T* last = nullptr;    // (B, H, E, D)
  T* before = nullptr;  // (B, C, H, D, E): the state before each chunk, or null
};

template <typename T>
struct LinearAttentionBackward : LinearAttention<T> {
  const T* before = nullptr;  // (B, C, H, D, E)
  const T* dy = nullptr;      // (B, T, H, E)
  const T* dlast = nullptr;   // (B, H, E, D)

  T* dq = nullptr;          // (B, parts, T, K, D): the part of some of the heads of values
  T* dk = nullptr;          // (B, parts, T, K, D)
  T* dv = nullptr;          // (B, T, H, E)
  T* dlog_decay = nullptr;  // (B, T, H)
  T* dstate = nullptr;      // (B, H, E, D)
};

// The number of steps between states that the forward pass of the selective scan keeps.
constexpr int64_t kSelectiveScanChunk = 16;

// The selective scan of Mamba with B rows, T steps in C chunks, F features and N states of each.
template <typename T>
struct SelectiveScan {
  using Real = T;
  int64_t batch = 0, time = 0, features = 0, states = 0;
  int64_t parts = 1;  // into which the features are divided

  const T* u = nullptr;         // (B, T, F)
  const T* dt = nullptr;        // (B, T, F)
  const T* A = nullptr;         // (B, N, F)
  const T* B = nullptr;         // (B, T, N)
  const T* C = nullptr;         // (B, T, N)
  const bool* reset = nullptr;  // (B, T): the state restarts before step t
};

template <typename T>
struct SelectiveScanForward : SelectiveScan<T> {
  const T* state = nullptr;  // (B, N, F)

  T* y = nullptr;       // (B, T, F)
  T* last = nullptr;    // (B, N, F)
  T* before = nullptr;  // (B, C, N, F): the state before each chunk, or null
};

template <typename T>
struct SelectiveScanBackward : SelectiveScan<T> {
  const T* before = nullptr;  // (B, C, N, F)
  const T* dy = nullptr;      // (B, T, F)
  const T* dlast = nullptr;   // (B, N, F)

  T* du = nullptr;      // (B, T, F)
  T* ddt = nullptr;     // (B, T, F)
  T* dA = nullptr;      // (B, N, F)
  T* dB = nullptr;      // (B, parts, T, N): the part of some of the features
  T* dC = nullptr;      // (B, parts, T, N)
  T* dstate = nullptr;  // (B, N, F)
};

template <typename Call>
using Kernel = void (*)(const Call&);

// The kernels that were compiled for one instruction set.
template <typename T>
struct Kernels {
  const char* isa;
  void (*forward)(Cell, const Forward<T>&);
  void (*backward)(Cell, const Backward<T>&);
  std::tuple<Kernel<AttentionForward<T>>, Kernel<AttentionBackward<T>>,
             Kernel<LinearAttentionForward<T>>, Kernel<LinearAttentionBackward<T>>,
             Kernel<SelectiveScanForward<T>>, Kernel<SelectiveScanBackward<T>>>
      operators;
};

// Returns the kernels for the best instruction set that this processor has.
template <typename T>
const Kernels<T>& kernels();

}  // namespace twinscan

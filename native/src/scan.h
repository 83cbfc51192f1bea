// The loop over the steps, and its division over threads.
//
// The units of a step are computed in panels of a few vectors. For each panel, the product of the
// previous step's numbers (h, or the gradients of the gates) with the packed weights is formed for
// all rows, and a cell (lstm.h, gru.h, rnn.h) makes the step's results of it while it is in the
// cache. The forward pass forms the products of x in the same way, for several steps at once.
// The work is divided into parts: the directions first, then the rows and the units of each. The
// division depends on the number of threads that the call may use, and not on how many have time for
// it, so that the results do not either. A thread begins with a part of its own and continues with
// those that nobody has begun. Parts with the same rows wait for one another after every step.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "call.h"
#include "pack.h"
#include "product.h"
#include "team.h"
#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// Where a vector of units of one row lies in the arrays, at one step.
struct Place {
  int64_t d;            // the direction
  int64_t unit, count;  // the first unit, and how many: a whole vector, or fewer in the last one
  int64_t state;        // in arrays of shape (D, B, H)
  int64_t padded;       // in arrays of the workspace, of shape (D, B, padded H)
  int64_t gates;        // in an array of shape (B, T, G·H), at the first gate
  int64_t kept;         // in arrays of shape (B, T, H)
  int64_t output;       // in arrays of shape (B, T, D·H)
  int64_t earlier;      // steps from t to the one before: −1, or 1 in reverse; 0 at a row's first
};

// What happens to a row at one step.
struct Row {
  bool active;    // the step is not padding
  bool restarts;  // forward: the state restarts after this step; backward: before it
};

// Into how many parts the work is divided.
struct Division {
  int64_t directions, rows, units;
  int64_t of_direction() const { return rows * units; }
  int64_t parts() const { return directions * of_direction(); }
};

// Runs all steps of a call. `Pass` is ForwardPass or BackwardPass of a cell.
template <typename Pass>
class Loop : public Job {
 public:
  using T = typename Pass::Real;
  using Call = typename Pass::Call;

  static void run(const Call& call) {
    const int threads = int(std::min<int64_t>(twinscan::threads(), useful_threads(call)));
    const auto loop = std::make_shared<Loop>(call, threads);
    twinscan::run(loop, int(std::min<int64_t>(threads, loop->division_.parts())));
  }

  Loop(const Call& call, int threads)
      : call_(call),
        pass_{call_},
        blocks_(ceil_div(call.hidden, kLanes<T>)),
        depth_(Pass::kForward ? call.hidden : kGates * blocks_ * kLanes<T>),
        // One vector more than a row needs: rows at a distance of a power of two would compete for
        // the same lines of the cache.
        stride_((ceil_div(depth_, kLanes<T>) + 1) * kLanes<T>),
        division_(divide(call, blocks_, threads)),
        rows_per_part_(std::max<int64_t>(1, ceil_div(call.batch, division_.rows))),
        row_slots_(round_up(rows_per_part_)),
        chunk_(std::max<int64_t>(1, std::min(call.time, ceil_div(kRowsOfX, rows_per_part_)))),
        slots_x_(round_up(chunk_ * rows_per_part_)),
        stride_x_((ceil_div(call.inputs, kLanes<T>) + 1) * kLanes<T>),
        totals_x_size_(ceil_div(blocks_, division_.units) * kVectors * slots_x_),
        memory_(bytes()),
        progress_(division_.parts()) {
    Arena arena(memory_.start());
    lay_out(arena);
    for (int64_t part = 0; part < division_.parts(); ++part) parts_.push_back(part_at(part));
  }

  void work(int thread) override {
    const int64_t groups = division_.directions * division_.rows, own = thread / division_.units;
    for (int64_t i = 0; i < groups; ++i) {
      run_group((own + i) % groups, i == 0 ? thread % division_.units : 0);
    }
    if (thread == 0) {  // the call returns
      for (int64_t part = 0; part < division_.parts(); ++part) wait(progress_[part], last_stage());
    }
  }

 private:
  static constexpr int kGates = Pass::kGates;
  // How many vectors of a panel belong to one vector of units: in the forward pass one per gate.
  static constexpr int kVectors = Pass::kForward ? kGates : 1;
  static constexpr int kMostBlocks = kMostVectors / kVectors;
  static constexpr int kFewestRows = 8;
  // A chunk has about this many rows of x, so that their product takes far longer than reading W_x.
  static constexpr int64_t kRowsOfX = 96;

  // Arrays of different parts must not share a line of the cache.
  static int64_t round_up(int64_t count) { return ceil_div(count, 64) * 64; }

  // Each thread is worth its waking from about a million multiplications on.
  static int64_t useful_threads(const Call& call) {
    const double products = double(call.directions) * double(call.batch) * double(call.time) *
                            double(kGates * call.hidden) * double(call.hidden + call.inputs);
    return 1 + int64_t(products < 1e9 ? products / 1e6 : 1000);
  }

  // Parts with rows of their own never wait for one another, but each reads all weights at every
  // step, which takes longer than the multiplications if a part has only a few rows.
  static Division divide(const Call& call, int64_t blocks, int threads) {
    const auto at_most = [](int64_t count, int64_t limit) {
      return std::max<int64_t>(1, std::min(count, limit));
    };
    const int64_t rows = at_most(call.batch / kFewestRows, threads / call.directions);
    return {call.directions, rows, at_most(blocks, threads / call.directions / rows)};
  }

  size_t bytes() {
    Arena count;
    lay_out(count);
    return count.bytes();
  }

  void lay_out(Arena& arena) {
    const int64_t rows = call_.directions * call_.batch, parts = division_.parts();
    packed_ = arena.take<T>(call_.directions * blocks_ * block_size(depth_));
    if (Pass::kForward) {
      const int64_t blocks = one_chunk() ? parts * kMostBlocks : call_.directions * blocks_;
      packed_x_ = arena.take<T>(blocks * block_size(call_.inputs));
      x_ = arena.take<T>(parts * slots_x_ * stride_x_);
      live_x_ = arena.take<bool>(parts * slots_x_);
      totals_x_ = arena.take<Vector<T>>(parts * totals_x_size_);
    }
    for (T*& shared : shared_) shared = arena.take<T>(rows * stride_);
    for (T*& state : pass_.states) state = arena.take<T>(rows * blocks_ * kLanes<T>);
    rows_ = arena.take<Row>(parts * row_slots_);
    live_ = arena.take<bool>(parts * row_slots_);
    totals_ = arena.take<Vector<T>>(parts * row_slots_ * kMostVectors);
  }

  // The packed weights of one vector of units.
  static int64_t block_size(int64_t depth) { return kVectors * kLanes<T> * depth; }

  // Some units of some rows of a direction.
  struct Part {
    int64_t index, d, row_part, row, rows, block, blocks, panels;

    int64_t panel_start(int64_t panel) const { return block + blocks * panel / panels; }
  };

  Part part_at(int64_t index) const {
    const auto start = [](int64_t all, int64_t part, int64_t parts) { return all * part / parts; };
    const int64_t unit_part = index % division_.units;
    Part part{};
    part.index = index;
    part.d = index / division_.of_direction();
    part.row_part = index / division_.units % division_.rows;
    part.row = start(call_.batch, part.row_part, division_.rows);
    part.rows = start(call_.batch, part.row_part + 1, division_.rows) - part.row;
    part.block = start(blocks_, unit_part, division_.units);
    part.blocks = start(blocks_, unit_part + 1, division_.units) - part.block;
    part.panels = ceil_div(part.blocks, kMostBlocks);
    return part;
  }

  // Runs the parts with the same direction and rows. Thread `first` of them begins with its own.
  void run_group(int64_t group, int64_t first) {
    const int64_t units = division_.units, start = group * units, all = division_.of_direction();
    // The parts of a direction share the packed weights.
    const int64_t start_all = start / all * all;
    share(start_all, all, start + first - start_all, 0, false,
          [&](const Part& part) { prepare(part); });
    for (int64_t part = start_all; part < start_all + all; ++part) wait(progress_[part], 0);
    if (units == 1) {
      share(start, 1, 0, 1, false, [&](const Part& part) {
        for (int64_t step = 0; step <= call_.time; ++step) run_step(part, step);
      });
      return;
    }
    bool alone = false;
    for (int64_t step = 0; step <= call_.time; ++step) {
      alone = share(start, units, first, 1 + step, !alone,
                    [&](const Part& part) { run_step(part, step); });
      for (int64_t part = start; part < start + units; ++part) wait(progress_[part], 1 + step);
    }
  }

  int64_t last_stage() const { return division_.units == 1 ? 1 : 1 + call_.time; }

  // Runs a stage of the part start + first and of those that no other thread begins, or, if this
  // thread is `patient`, begins within a few µs. Returns whether there were any of these.
  template <typename Run>
  bool share(int64_t start, int64_t count, int64_t first, int64_t stage, bool patient, Run run) {
    bool others = false;
    for (int64_t i = 0, part = start + first; i < count; ++i, ++part) {
      if (part == start + count) part = start;
      if (i > 0 && patient && done_soon(progress_[part], stage)) continue;
      if (!progress_[part].begin(stage)) continue;
      run(parts_[part]);
      progress_[part].end(stage);
      wake();
      others |= i > 0;
    }
    return others;
  }

  void prepare(const Part& part) {
    pack_panels(part);
    Row* rows = rows_ + part.index * row_slots_;
    for (int64_t b = 0; b < part.rows; ++b) rows[b] = {};
    for_each_place(part, part.block, part.blocks, 0, [&](Place at, int64_t b, int64_t) {
      pass_.start(at, pass_.kForward && call_.time > 0 &&
                          call_.restarts(part.d, part.row + b, time_of(part.d, 0)),
                  shared_[0] + shared_row(part, b) + at.unit);
    });
  }

  void run_step(const Part& part, int64_t step) {
    Row* rows = rows_ + part.index * row_slots_;
    bool* live = live_ + part.index * row_slots_;
    T* const now = shared_[step % 2];
    T* const next = shared_[(step + 1) % 2];
    const bool multiply = Pass::kForward ? step < call_.time : step > 0;
    const int64_t t = time_of(part.d, step);
    for (int64_t b = 0; b < part.rows; ++b) {
      // The gradients of the gates are those of the step that the pass has just left.
      if (!Pass::kForward) live[b] = rows[b].active && !rows[b].restarts;
      rows[b] = row_at(part.d, part.row + b, step);
      if (Pass::kForward) live[b] = rows[b].active;
    }
    if constexpr (Pass::kForward) {
      if (step < call_.time && step % chunk_ == 0) multiply_x(part, step);
    }
    for (int64_t panel = 0; panel < part.panels; ++panel) {
      const int64_t block = part.panel_start(panel);
      const int blocks = int(part.panel_start(panel + 1) - block);
      Vector<T>* totals = totals_ + part.index * row_slots_ * kMostVectors;
      const int vectors = blocks * kVectors;
      for (int64_t i = 0; i < part.rows * vectors; ++i) totals[i] = Vector<T>{};
      products<T>(vectors, packed_ + (part.d * blocks_ + block) * block_size(depth_),
                  now + shared_row(part, 0), stride_, multiply ? depth_ : 0, part.rows, live,
                  totals);
      for_each_place(part, block, blocks, t, [&](Place at, int64_t b, int64_t v) {
        const Vector<T>* sums = totals + b * vectors + v * kVectors;
        const int64_t row_x = step % chunk_ * part.rows + b;
        const Vector<T>* of_x =
            Pass::kForward ? totals_x(part, block) + row_x * vectors + v * kVectors : nullptr;
        const int64_t shared = shared_row(part, b) + at.unit;
        if (step < call_.time) {
          pass_.step(at, rows[b], of_x, sums, now + shared, next + shared);
        } else {
          pass_.finish(at, sums, now + shared);
        }
      });
    }
  }

  // Packs the panels of this part's units. Parts with the same units share this work.
  void pack_panels(const Part& part) {
    const int64_t hidden = call_.hidden;
    const T* kernel = call_.kernel + part.d * hidden * kGates * hidden;
    for (int64_t panel = part.row_part; panel < part.panels; panel += division_.rows) {
      const int64_t block = part.panel_start(panel);
      const int blocks = int(part.panel_start(panel + 1) - block);
      T* packed = packed_ + (part.d * blocks_ + block) * block_size(depth_);
      if constexpr (Pass::kForward) {
        pack(kernel, hidden, hidden, kGates, block, blocks, packed);
        if (!one_chunk()) pack_x(part, block, blocks);
      } else {
        pack_transposed(kernel, hidden, kGates, block, blocks, packed);
      }
    }
  }

  void pack_x(const Part& part, int64_t block, int blocks) {
    const T* kernel_x = call_.kernel_x + part.d * call_.inputs * kGates * call_.hidden;
    pack(kernel_x, call_.inputs, call_.hidden, kGates, block, blocks, packed_x(part, block));
  }

  // Whether one chunk holds all steps. Each panel of W_x is then used once, and the next one
  // overwrites it.
  bool one_chunk() const { return chunk_ >= call_.time; }

  T* packed_x(const Part& part, int64_t block) const {
    const int64_t first = one_chunk() ? part.index * kMostBlocks : part.d * blocks_ + block;
    return packed_x_ + first * block_size(call_.inputs);
  }

  // The products of x with the panel that starts at `block`, for the steps of a chunk.
  Vector<T>* totals_x(const Part& part, int64_t block) const {
    return totals_x_ + part.index * totals_x_size_ +
           (block - part.block) * kVectors * chunk_ * part.rows;
  }

  // Computes x W_x + b for the steps of the chunk that starts at step `first`.
  void multiply_x(const Part& part, int64_t first) {
    const int64_t steps = std::min(chunk_, call_.time - first), count = steps * part.rows;
    T* x = x_ + part.index * slots_x_ * stride_x_;
    bool* live = live_x_ + part.index * slots_x_;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t b = part.row + i % part.rows, t = time_of(part.d, first + i / part.rows);
      live[i] = call_.active(b, t);
      std::copy_n(call_.x + (b * call_.time + t) * call_.inputs, call_.inputs, x + i * stride_x_);
    }
    for (int64_t panel = 0; panel < part.panels; ++panel) {
      const int64_t block = part.panel_start(panel);
      const int blocks = int(part.panel_start(panel + 1) - block), vectors = blocks * kVectors;
      if (one_chunk()) pack_x(part, block, blocks);
      Vector<T> bias[kMostVectors];
      for (int v = 0; v < vectors; ++v) {
        const int64_t unit = (block + v / kGates) * kLanes<T>, left = call_.hidden - unit;
        bias[v] = load(call_.bias + (part.d * kGates + v % kGates) * call_.hidden + unit,
                       left < kLanes<T> ? left : kLanes<T>);
      }
      Vector<T>* totals = totals_x(part, block);
      for (int64_t i = 0; i < count * vectors; ++i) totals[i] = bias[i % vectors];
      products<T>(vectors, packed_x(part, block), x, stride_x_, call_.inputs, count, live, totals);
    }
  }

  // The step's position in the sequence. The backward pass goes against the direction of the scan.
  int64_t time_of(int64_t d, int64_t step) const {
    return call_.reversed(d) == Pass::kForward ? call_.time - 1 - step : step;
  }

  Row row_at(int64_t d, int64_t b, int64_t step) const {
    if (step == call_.time) return {};
    const int64_t t = time_of(d, step);
    const bool last = step + 1 == call_.time;
    const bool restarts = Pass::kForward ? !last && call_.restarts(d, b, time_of(d, step + 1))
                                         : call_.restarts(d, b, t);
    return {call_.active(b, t), restarts};
  }

  int64_t shared_row(const Part& part, int64_t b) const {
    return (part.d * call_.batch + part.row + b) * stride_;
  }

  // Calls visit(place, row of the part, vector of the panel).
  template <typename Visit>
  void for_each_place(const Part& part, int64_t block, int64_t blocks, int64_t t, Visit visit) {
    const int64_t hidden = call_.hidden;
    const bool reversed = call_.reversed(part.d);
    for (int64_t b = 0; b < part.rows; ++b) {
      const int64_t row = part.row + b, state = part.d * call_.batch + row;
      const int64_t kept = (row * call_.time + t) * hidden;
      const int64_t output = kept * call_.directions + part.d * hidden;
      const bool first = call_.first(part.d, row, t);
      for (int64_t v = 0; v < blocks; ++v) {
        const int64_t unit = (block + v) * kLanes<T>, left = hidden - unit;
        visit(Place{part.d, unit, left < kLanes<T> ? left : kLanes<T>, state * hidden + unit,
                    state * blocks_ * kLanes<T> + unit, kept * kGates + unit, kept + unit,
                    output + unit, first ? 0 : reversed ? 1 : -1},
              b, v);
      }
    }
  }

  const Call call_;
  Pass pass_;
  const int64_t blocks_, depth_, stride_;
  const Division division_;
  const int64_t rows_per_part_;  // at most
  const int64_t row_slots_;      // space for the rows of a part
  const int64_t chunk_;          // the number of steps whose products of x are formed at once
  const int64_t slots_x_;        // space for the rows of x of a part in a chunk
  const int64_t stride_x_;       // the distance between two rows of x
  const int64_t totals_x_size_;  // space for x W_x + b of a part in a chunk
  const Memory memory_;
  std::vector<Progress> progress_;  // of each part
  std::vector<Part> parts_;
  T *packed_, *packed_x_;    // the weights
  T* x_;                     // of each part: the rows of x of a chunk
  bool* live_x_;             // of each part: which rows of x are not padding
  Vector<T>* totals_x_;      // of each part: x W_x + b for a chunk
  T* shared_[2];             // h, or the gradients of the gates, of two steps in turn
  Row* rows_;                // of each part
  bool* live_;               // of each part: which rows take part in the product
  Vector<T>* totals_;        // of each part: the products with a panel
};

}  // namespace twinscan::TWINSCAN_ISA

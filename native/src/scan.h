// The loop over the steps, and its division over threads.
//
// The units of a step are computed in panels of a few vectors. For each panel, the product of the
// previous step's numbers (h, or the gradients of the gates) with the packed weights is formed for
// all rows, and a cell (lstm.h, gru.h, rnn.h) makes the step's results of it while it is in the
// cache. Threads divide the directions first, then the rows and the units of each. Threads that
// share rows meet after every step.
#pragma once

#include "call.h"
#include "pack.h"
#include "product.h"
#include "team.h"
#include "vector.h"

namespace twinscan::TWINSCAN_ISA {

// Where a vector of units of one row lies in the arrays, at one step.
struct Place {
  int64_t unit, count;  // the first unit, and how many: a whole vector, or fewer in the last one
  int64_t state;        // in arrays of shape (D, B, H)
  int64_t bias;         // in arrays of shape (D, G·H), at the first gate
  int64_t padded;       // in arrays of the workspace, of shape (D, B, padded H)
  int64_t gates;        // in arrays of shape (B, T, D·G·H), at the first gate
  int64_t output;       // in arrays of shape (B, T, D·H)
  int64_t earlier;      // the same at the step before; −1 at a row's first step
};

// What happens to a row at one step.
struct Row {
  bool active;    // the step is not padding
  bool restarts;  // forward: the state restarts after this step; backward: before it
};

// Into how many parts the threads divide the work.
struct Division {
  int directions, rows, units;
  int threads() const { return directions * rows * units; }
};

// Runs all steps of a call. `Pass` is ForwardPass or BackwardPass of a cell.
template <typename Pass>
class Loop {
 public:
  using T = typename Pass::Real;
  using Call = typename Pass::Call;

  static void run(const Call& call) {
    Crew crew(wanted_threads(call));
    Loop loop(call, crew);
    Arena count;
    loop.lay_out(count);
    Memory memory(count.bytes());
    Arena arena(memory.start());
    loop.lay_out(arena);
    crew.run(loop.division_.threads(), &Loop::work, &loop);
  }

 private:
  static constexpr int kGates = Pass::kGates;
  // How many vectors of a panel belong to one vector of units: in the forward pass one per gate.
  static constexpr int kVectors = Pass::kForward ? kGates : 1;
  static constexpr int kMostBlocks = kMostVectors / kVectors;
  static constexpr int kFewestRows = 8;

  Loop(const Call& call, Crew& crew)
      : call_(call),
        crew_(crew),
        pass_{call},
        blocks_(ceil_div(call.hidden, kLanes<T>)),
        depth_(Pass::kForward ? call.hidden : kGates * blocks_ * kLanes<T>),
        // One vector more than a row needs: rows at a distance of a power of two would compete for
        // the same lines of the cache.
        stride_((ceil_div(depth_, kLanes<T>) + 1) * kLanes<T>),
        division_(divide(call, blocks_, crew.size())),
        row_slots_(ceil_div(ceil_div(call.batch, division_.rows), 64) * 64) {}

  // Each thread is worth its waking from about a million multiplications on.
  static int wanted_threads(const Call& call) {
    const double products = double(call.directions) * double(call.batch) * double(call.time) *
                            double(call.hidden) * double(kGates * call.hidden);
    return 1 + int(products < 1e9 ? products / 1e6 : 1000);
  }

  // Threads with rows of their own never wait for one another, but each reads all weights at every
  // step, which takes longer than the multiplications if a thread has only a few rows.
  static Division divide(const Call& call, int64_t blocks, int threads) {
    const auto at_most = [](int64_t count, int64_t limit) {
      return int(count < 1 ? 1 : count < limit ? count : limit);
    };
    const int directions = at_most(call.directions, threads);
    const int rows = at_most(call.batch / kFewestRows, threads / directions);
    return {directions, rows, at_most(blocks, threads / directions / rows)};
  }

  void lay_out(Arena& arena) {
    const int64_t rows = call_.directions * call_.batch;
    packed_ = arena.take<T>(call_.directions * panel_size(blocks_));
    for (T*& shared : shared_) shared = arena.take<T>(rows * stride_);
    for (T*& state : pass_.states) state = arena.take<T>(rows * blocks_ * kLanes<T>);
    rows_ = arena.take<Row>(division_.threads() * row_slots_);
    live_ = arena.take<bool>(division_.threads() * row_slots_);
    totals_ = arena.take<Vector<T>>(division_.threads() * row_slots_ * kMostVectors);
  }

  int64_t panel_size(int64_t blocks) const { return blocks * kVectors * kLanes<T> * depth_; }

  static void work(void* self, int thread) {
    Loop& loop = *static_cast<Loop*>(self);
    const auto [directions, row_parts, unit_parts] = loop.division_;
    const int unit_part = thread % unit_parts, row_part = thread / unit_parts % row_parts;
    const int direction_part = thread / (unit_parts * row_parts);
    const auto start = [](int64_t all, int part, int parts) { return all * part / parts; };
    Part part{};
    part.thread = thread;
    part.row = start(loop.call_.batch, row_part, row_parts);
    part.rows = start(loop.call_.batch, row_part + 1, row_parts) - part.row;
    part.block = start(loop.blocks_, unit_part, unit_parts);
    part.blocks = start(loop.blocks_, unit_part + 1, unit_parts) - part.block;
    part.panels = ceil_div(part.blocks, kMostBlocks);
    part.row_part = row_part;
    const int64_t end = start(loop.call_.directions, direction_part + 1, directions);
    for (part.d = start(loop.call_.directions, direction_part, directions); part.d < end; ++part.d) {
      loop.run_part(part);
    }
  }

  // The part of a direction that one thread computes.
  struct Part {
    int thread, row_part;
    int64_t d, row, rows, block, blocks, panels;

    int64_t panel_start(int64_t panel) const { return block + blocks * panel / panels; }
  };

  void run_part(const Part& part) {
    const int meeting = part.thread - part.thread % division_.units;
    pack_panels(part);
    Row* rows = rows_ + part.thread * row_slots_;
    bool* live = live_ + part.thread * row_slots_;
    for (int64_t b = 0; b < part.rows; ++b) rows[b] = {};
    for_each_place(part, part.block, part.blocks, 0, [&](Place at, int64_t b, int64_t) {
      pass_.start(at, pass_.kForward && call_.time > 0 &&
                          call_.restarts(part.d, part.row + b, time_of(part.d, 0)),
                  shared_[0] + shared_row(part, b) + at.unit);
    });
    const int all = division_.rows * division_.units;
    crew_.meet(part.thread, part.thread / all * all, all);
    for (int64_t step = 0; step <= call_.time; ++step) {
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
      for (int64_t panel = 0; panel < part.panels; ++panel) {
        const int64_t block = part.panel_start(panel);
        const int blocks = int(part.panel_start(panel + 1) - block);
        Vector<T>* totals = totals_ + part.thread * row_slots_ * kMostVectors;
        const int vectors = blocks * kVectors;
        products<T>(vectors, packed_ + part.d * panel_size(blocks_) + panel_size(block),
                    now + shared_row(part, 0), stride_, multiply ? depth_ : 0, part.rows, live,
                    totals);
        for_each_place(part, block, blocks, t, [&](Place at, int64_t b, int64_t v) {
          const Vector<T>* sums = totals + b * vectors + v * kVectors;
          const int64_t shared = shared_row(part, b) + at.unit;
          if (step < call_.time) {
            pass_.step(at, rows[b], sums, now + shared, next + shared);
          } else {
            pass_.finish(at, sums, now + shared);
          }
        });
      }
      crew_.meet(part.thread, meeting, division_.units);
    }
  }

  // Packs the panels of this part's units. Threads with the same units share this work.
  void pack_panels(const Part& part) {
    for (int64_t panel = part.row_part; panel < part.panels; panel += division_.rows) {
      const int64_t block = part.panel_start(panel);
      const auto pack_panel = Pass::kForward ? pack<T> : pack_transposed<T>;
      pack_panel(call_.kernel + part.d * call_.hidden * kGates * call_.hidden, call_.hidden, kGates,
                 block, int(part.panel_start(panel + 1) - block),
                 packed_ + part.d * panel_size(blocks_) + panel_size(block));
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
    const int64_t hidden = call_.hidden, columns = call_.directions * hidden;
    const bool reversed = call_.reversed(part.d);
    for (int64_t b = 0; b < part.rows; ++b) {
      const int64_t row = part.row + b, state = part.d * call_.batch + row;
      const int64_t at = row * call_.time + t;
      const bool first = reversed ? t + 1 >= call_.lengths[row] : t == 0;
      for (int64_t v = 0; v < blocks; ++v) {
        const int64_t unit = (block + v) * kLanes<T>, left = hidden - unit;
        const int64_t output = at * columns + part.d * hidden + unit;
        visit(Place{unit, left < kLanes<T> ? left : kLanes<T>, state * hidden + unit,
                    part.d * kGates * hidden + unit, state * blocks_ * kLanes<T> + unit,
                    (at * columns + part.d * hidden) * kGates + unit, output,
                    first ? -1 : output + (reversed ? columns : -columns)},
              b, v);
      }
    }
  }

  const Call& call_;
  Crew& crew_;
  Pass pass_;
  const int64_t blocks_, depth_, stride_;
  const Division division_;
  const int64_t row_slots_;   // the rows of one thread, rounded up
  T* packed_;                 // the weights
  T* shared_[2];              // h, or the gradients of the gates, of two steps in turn
  Row* rows_;                 // of each thread
  bool* live_;                // of each thread: which rows take part in the product
  Vector<T>* totals_;         // of each thread: the products with a panel
};

}  // namespace twinscan::TWINSCAN_ISA

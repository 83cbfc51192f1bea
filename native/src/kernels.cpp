// The kernels for one instruction set. CMakeLists.txt compiles this file once for each.
#include <algorithm>
#include <memory>

#include "attention.h"
#include "gru.h"
#include "linear_attention.h"
#include "lstm.h"
#include "rnn.h"
#include "selective_scan.h"

namespace twinscan::TWINSCAN_ISA {

template <typename T>
void forward(Cell cell, const Forward<T>& call) {
  switch (cell) {
    case Cell::kLstm:
      return Loop<ForwardPass<T, LstmForward>>::run(call);
    case Cell::kGru:
      return Loop<ForwardPass<T, GruForward>>::run(call);
    case Cell::kRnn:
      return Loop<ForwardPass<T, RnnForward>>::run(call);
  }
}

template <typename T>
void backward(Cell cell, const Backward<T>& call) {
  switch (cell) {
    case Cell::kLstm:
      return Loop<BackwardPass<T, LstmBackward>>::run(call);
    case Cell::kGru:
      return Loop<BackwardPass<T, GruBackward>>::run(call);
    case Cell::kRnn:
      return Loop<BackwardPass<T, RnnBackward>>::run(call);
  }
}

template <template <typename> class JobOf, typename Call>
void run_job(const Call& call) {
  using Job = JobOf<typename Call::Real>;
  const int threads = int(std::min(double(twinscan::threads()), 1 + Job::useful_threads(call)));
  run(std::make_shared<Job>(call, threads), threads);
}

extern const Kernels<float> kernels_float32;
extern const Kernels<double> kernels_float64;
#define TWINSCAN_TEXT(name) #name
#define TWINSCAN_NAME(isa) TWINSCAN_TEXT(isa)
template <typename T>
constexpr Kernels<T> kernels_of_type{
    TWINSCAN_NAME(TWINSCAN_ISA), forward<T>, backward<T>,
    {run_job<AttentionForwardJob, AttentionForward<T>>,
     run_job<AttentionBackwardJob, AttentionBackward<T>>,
     run_job<LinearAttentionForwardJob, LinearAttentionForward<T>>,
     run_job<LinearAttentionBackwardJob, LinearAttentionBackward<T>>,
     run_job<SelectiveScanForwardJob, SelectiveScanForward<T>>,
     run_job<SelectiveScanBackwardJob, SelectiveScanBackward<T>>}};
const Kernels<float> kernels_float32 = kernels_of_type<float>;
const Kernels<double> kernels_float64 = kernels_of_type<double>;

}  // namespace twinscan::TWINSCAN_ISA

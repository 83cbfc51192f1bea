// The kernels for one instruction set. CMakeLists.txt compiles this file once for each.
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

extern const Kernels<float> kernels_float32;
extern const Kernels<double> kernels_float64;
#define TWINSCAN_TEXT(name) #name
#define TWINSCAN_NAME(isa) TWINSCAN_TEXT(isa)
template <typename T>
constexpr Kernels<T> kernels_of_type{
    TWINSCAN_NAME(TWINSCAN_ISA), forward<T>, backward<T>,
    run_attention<AttentionForwardJob, AttentionForward<T>>,
    run_attention<AttentionBackwardJob, AttentionBackward<T>>,
    run_linear_attention<LinearAttentionForwardJob, LinearAttentionForward<T>>,
    run_linear_attention<LinearAttentionBackwardJob, LinearAttentionBackward<T>>,
    run_selective_scan<SelectiveScanForwardJob, SelectiveScanForward<T>>,
    run_selective_scan<SelectiveScanBackwardJob, SelectiveScanBackward<T>>};
const Kernels<float> kernels_float32 = kernels_of_type<float>;
const Kernels<double> kernels_float64 = kernels_of_type<double>;

}  // namespace twinscan::TWINSCAN_ISA

// A plain loop over the steps, without vectors or threads.
#include <cmath>
#include <vector>

#include "call.h"

namespace twinscan {
namespace {

template <typename T>
T sigmoid(T x) { return 1 / (1 + std::exp(-x)); }

template <typename T>
void forward(Cell cell, const Forward<T>& s) {
  const int64_t D = s.directions, B = s.batch, N = s.time, H = s.hidden, G = gates_of(cell);
  std::vector<T> h(H), c(H), sums(G * H);
  for (int64_t d = 0; d < D; ++d)
    for (int64_t b = 0; b < B; ++b) {
      const int64_t state = (d * B + b) * H;
      for (int64_t j = 0; j < H; ++j) {
        h[j] = s.h0[state + j];
        c[j] = s.c0 ? s.c0[state + j] : 0;
      }
      for (int64_t i = 0; i < N; ++i) {
        const int64_t t = s.reversed(d) ? N - 1 - i : i;
        const int64_t g = (b * N + t) * D * G * H + d * G * H, u = (b * N + t) * D * H + d * H;
        if (!s.active(b, t)) {
          for (int64_t j = 0; j < H; ++j) {
            s.y[u + j] = 0;
            if (s.cells) s.cells[u + j] = 0;
            if (s.n_h) s.n_h[u + j] = 0;
          }
          if (s.gates) for (int64_t j = 0; j < G * H; ++j) s.gates[g + j] = 0;
          continue;
        }
        if (s.restarts(d, b, t)) for (int64_t j = 0; j < H; ++j) h[j] = c[j] = 0;
        for (auto& sum : sums) sum = 0;
        for (int64_t k = 0; k < H; ++k)
          for (int64_t j = 0; j < G * H; ++j) sums[j] += h[k] * s.kernel[(d * H + k) * G * H + j];
        for (int64_t j = 0; j < H; ++j) {
          const T* x = s.gates_x + g + j;
          const T* a = sums.data() + j;
          if (cell == Cell::kLstm) {
            const T in = sigmoid(x[0] + a[0]), forget = sigmoid(x[H] + a[H]);
            const T candidate = std::tanh(x[2 * H] + a[2 * H]), out = sigmoid(x[3 * H] + a[3 * H]);
            c[j] = forget * c[j] + in * candidate;
            h[j] = out * std::tanh(c[j]);
            if (s.gates) {
              T* kept = s.gates + g + j;
              kept[0] = in, kept[H] = forget, kept[2 * H] = candidate, kept[3 * H] = out;
              s.cells[u + j] = c[j];
            }
          } else if (cell == Cell::kGru) {
            const T r = sigmoid(x[0] + a[0]), z = sigmoid(x[H] + a[H]);
            const T n_h = a[2 * H] + s.bias_hn[d * H + j], n = std::tanh(x[2 * H] + r * n_h);
            h[j] = n + z * (h[j] - n);
            if (s.gates) {
              T* kept = s.gates + g + j;
              kept[0] = r, kept[H] = z, kept[2 * H] = n;
              s.n_h[u + j] = n_h;
            }
          } else {
            const T sum = x[0] + a[0];
            h[j] = s.relu ? (sum > 0 ? sum : 0) : std::tanh(sum);
          }
          s.y[u + j] = h[j];
        }
      }
      for (int64_t j = 0; j < H; ++j) {
        s.h[state + j] = h[j];
        if (s.c) s.c[state + j] = c[j];
      }
    }
}

template <typename T>
void backward(Cell cell, const Backward<T>& s) {
  const int64_t D = s.directions, B = s.batch, N = s.time, H = s.hidden, G = gates_of(cell);
  std::vector<T> dh(H), dc(H), dsums(G * H);
  for (int64_t d = 0; d < D; ++d)
    for (int64_t b = 0; b < B; ++b) {
      const int64_t state = (d * B + b) * H;
      for (int64_t j = 0; j < H; ++j) {
        dh[j] = s.dh[state + j];
        dc[j] = s.dc ? s.dc[state + j] : 0;
      }
      for (int64_t i = N - 1; i >= 0; --i) {
        const int64_t t = s.reversed(d) ? N - 1 - i : i;
        const int64_t before = s.reversed(d) ? t + 1 : t - 1;
        const int64_t g = (b * N + t) * D * G * H + d * G * H, u = (b * N + t) * D * H + d * H;
        if (!s.active(b, t)) {
          for (int64_t j = 0; j < G * H; ++j) s.dgates_x[g + j] = 0;
          if (s.dn_h) for (int64_t j = 0; j < H; ++j) s.dn_h[u + j] = 0;
          continue;
        }
        const bool first = before < 0 || before >= s.lengths[b], restarts = s.restarts(d, b, t);
        const int64_t u_before = u + (before - t) * D * H;
        for (int64_t j = 0; j < H; ++j) {
          dh[j] += s.dy[u + j];
          T* dx = s.dgates_x + g + j;
          T* da = dsums.data() + j;
          const T* kept = s.gates + g + j;
          if (cell == Cell::kLstm) {
            const T in = kept[0], forget = kept[H], candidate = kept[2 * H], out = kept[3 * H];
            const T c_before = restarts ? 0 : first ? s.c0[state + j] : s.cells[u_before + j];
            const T tanh_c = std::tanh(s.cells[u + j]);
            dc[j] += dh[j] * out * (1 - tanh_c * tanh_c);
            dx[0] = da[0] = dc[j] * candidate * in * (1 - in);
            dx[H] = da[H] = dc[j] * c_before * forget * (1 - forget);
            dx[2 * H] = da[2 * H] = dc[j] * in * (1 - candidate * candidate);
            dx[3 * H] = da[3 * H] = dh[j] * tanh_c * out * (1 - out);
            dc[j] *= forget;
            dh[j] = 0;
          } else if (cell == Cell::kGru) {
            const T r = kept[0], z = kept[H], n = kept[2 * H], n_h = s.n_h[u + j];
            const T h_before = restarts ? 0 : first ? s.h0[state + j] : s.y[u_before + j];
            const T dn = dh[j] * (1 - z) * (1 - n * n);
            dx[0] = da[0] = dn * n_h * r * (1 - r);
            dx[H] = da[H] = dh[j] * (h_before - n) * z * (1 - z);
            dx[2 * H] = dn;
            da[2 * H] = s.dn_h[u + j] = dn * r;
            dh[j] *= z;
          } else {
            const T y = s.y[u + j];
            dx[0] = da[0] = s.relu ? (y > 0 ? dh[j] : 0) : dh[j] * (1 - y * y);
            dh[j] = 0;
          }
        }
        for (int64_t k = 0; k < H; ++k) {
          for (int64_t j = 0; j < G * H; ++j) dh[k] += dsums[j] * s.kernel[(d * H + k) * G * H + j];
          if (restarts) dh[k] = dc[k] = 0;
        }
      }
      for (int64_t j = 0; j < H; ++j) {
        s.dh0[state + j] = dh[j];
        if (s.dc0) s.dc0[state + j] = dc[j];
      }
    }
}

}  // namespace

template <typename T>
const Kernels<T>& kernels() {
  static const Kernels<T> plain{forward<T>, backward<T>};
  return plain;
}
template const Kernels<float>& kernels();
template const Kernels<double>& kernels();

}  // namespace twinscan

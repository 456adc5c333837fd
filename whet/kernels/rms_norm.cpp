// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows and its gradient. Sums are float32 and in one order for each row, so that a row's result does not
// depend on what else is in the batch.

#include <cmath>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t FEW = 16384;  // numbers that one thread does sooner than two

// y = x * scale, rounded to X, * weight, where scale = 1 / sqrt(mean(x^2) + eps).
template <class X, class W, class Y>
void forward(const X* x, const W* weight, Y* y, float* scales, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > FEW)
  for (int64_t row = 0; row < rows; ++row) {
    const X* from = x + row * width;
    Y* to = y + row * width;
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += widen(from[i]) * widen(from[i]);
    const float scale = 1 / std::sqrt(squares / width + eps);
    scales[row] = scale;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
      to[i] = narrow<Y>(widen(narrow<X>(widen(from[i]) * scale)) * widen(weight[i]));
  }
}

// With u = x scale and g = grad weight: grad_x = scale (g - u mean(g u)), grad_weight = sum of grad u over rows.
template <class X, class W, class G>
void backward(const G* grad, const X* x, const W* weight, const float* scales, X* grad_x, float* grad_weight,
              int64_t rows, int64_t width) {
  const int threads = rows * width > FEW ? omp_get_max_threads() : 1;
  std::vector<float> sums(threads * width, 0.0f);  // of each thread's own rows
#pragma omp parallel num_threads(threads)
  {
    float* sum = sums.data() + omp_get_thread_num() * width;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const G* g = grad + row * width;
      const X* from = x + row * width;
      X* to = grad_x + row * width;
      const float scale = scales[row];
      float along = 0;
#pragma omp simd reduction(+ : along)
      for (int64_t i = 0; i < width; ++i) along += widen(g[i]) * widen(weight[i]) * widen(from[i]);
      along *= scale / width;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        const float unit = widen(from[i]) * scale, own = widen(g[i]);
        sum[i] += own * unit;
        to[i] = narrow<X>(scale * (own * widen(weight[i]) - unit * along));
      }
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    grad_weight[i] = 0;
    for (int thread = 0; thread < threads; ++thread) grad_weight[i] += sums[thread * width + i];
  }
}

template <class X, class W>
void forward_to(bool narrow_y, const void* x, const void* weight, void* y, float* scales, int64_t rows, int64_t width,
                float eps) {
  const auto* from = static_cast<const X*>(x);
  const auto* w = static_cast<const W*>(weight);
  if (narrow_y)
    forward(from, w, static_cast<bfloat16*>(y), scales, rows, width, eps);
  else
    forward(from, w, static_cast<float*>(y), scales, rows, width, eps);
}

template <class X, class W>
void backward_from(bool narrow_grad, const void* grad, const void* x, const void* weight, const float* scales,
                   void* grad_x, float* grad_weight, int64_t rows, int64_t width) {
  const auto* from = static_cast<const X*>(x);
  const auto* w = static_cast<const W*>(weight);
  auto* to = static_cast<X*>(grad_x);
  if (narrow_grad)
    backward(static_cast<const bfloat16*>(grad), from, w, scales, to, grad_weight, rows, width);
  else
    backward(static_cast<const float*>(grad), from, w, scales, to, grad_weight, rows, width);
}

}  // namespace

// Each flag says that a tensor is bfloat16, and not float32. All are contiguous: x, y and their gradients
// [rows, width], weight and grad_weight [width], scales [rows].
extern "C" void whet_rms_norm(int narrow_x, int narrow_weight, int narrow_y, const void* x, const void* weight,
                              void* y, float* scales, int64_t rows, int64_t width, float eps) {
  const auto run = narrow_x ? (narrow_weight ? forward_to<bfloat16, bfloat16> : forward_to<bfloat16, float>)
                            : (narrow_weight ? forward_to<float, bfloat16> : forward_to<float, float>);
  run(narrow_y, x, weight, y, scales, rows, width, eps);
}

extern "C" void whet_rms_norm_backward(int narrow_x, int narrow_weight, int narrow_grad, const void* grad,
                                       const void* x, const void* weight, const float* scales, void* grad_x,
                                       float* grad_weight, int64_t rows, int64_t width) {
  const auto run = narrow_x ? (narrow_weight ? backward_from<bfloat16, bfloat16> : backward_from<bfloat16, float>)
                            : (narrow_weight ? backward_from<float, bfloat16> : backward_from<float, float>);
  run(narrow_grad, grad, x, weight, scales, grad_x, grad_weight, rows, width);
}

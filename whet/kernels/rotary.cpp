// SPDX-License-Identifier: Apache-2.0
// Rotary positions of queries or keys, and their gradient. A head's numbers are pairs (a, b), half a head apart:
//   a' = a cos - b sin, b' = b cos + a sin, by the angle of the pair at the token's position.
// Products are rounded before they are added, as torch does, so that the results have its bits.

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t FEW = 16384;  // numbers that one thread does sooner than two

// `From` and `To`: the numbers read and written. Backward, each product is rounded to the numbers that are written.
template <bool is_backward, class From, class To>
void rotate(const From* x, const float* cosines, const float* sines, To* out, int64_t tokens, int64_t heads,
            int64_t size) {
  const int64_t half = size / 2;
#pragma omp parallel for schedule(static) if (tokens * heads * size > FEW)
  for (int64_t token = 0; token < tokens; ++token) {
    const float *cosine = cosines + token * size, *sine = sines + token * size;
    for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
      for (int64_t at = 0; at < half; at += WIDTH) {
        const int64_t left = half - at, first = row * size + at, second = first + half;
        const floats a = load_up_to(x + first, left), b = load_up_to(x + second, left);
        const floats cos_a = load_up_to(cosine + at, left), cos_b = load_up_to(cosine + half + at, left);
        const floats sin_a = load_up_to(sine + at, left), sin_b = load_up_to(sine + half + at, left);
        if (is_backward) {
          store_up_to(out + first, rounded<To>(a * cos_a) + rounded<To>(b * sin_b), left);
          store_up_to(out + second, rounded<To>(b * cos_b) - rounded<To>(a * sin_a), left);
        } else {
          store_up_to(out + first, a * cos_a - b * sin_a, left);
          store_up_to(out + second, b * cos_b + a * sin_b, left);
        }
      }
    }
  }
}

}  // namespace

// All tensors are contiguous: x and out [batch, rows, heads, size], cosines and sines [batch, rows, size] in float32. x
// and out are float32, but if `is_narrow`, x is bfloat16 forward, and out backward.
extern "C" void whet_rotary(int is_narrow, int is_backward, const void* x, const float* cosines, const float* sines,
                            void* out, int64_t batch, int64_t rows, int64_t heads, int64_t size) {
  const float* from = static_cast<const float*>(x);
  float* to = static_cast<float*>(out);
  const int64_t tokens = batch * rows;
  if (is_narrow && is_backward)
    rotate<true>(from, cosines, sines, static_cast<bfloat16*>(out), tokens, heads, size);
  else if (is_narrow)
    rotate<false>(static_cast<const bfloat16*>(x), cosines, sines, to, tokens, heads, size);
  else if (is_backward)
    rotate<true>(from, cosines, sines, to, tokens, heads, size);
  else
    rotate<false>(from, cosines, sines, to, tokens, heads, size);
}

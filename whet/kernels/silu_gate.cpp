// SPDX-License-Identifier: Apache-2.0
// silu(gate) * up and its gradients, each in one pass over the numbers. Every number is computed alone, in float32, and
// rounded where torch rounds.

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 4096;  // numbers that a thread takes at a time
constexpr int64_t FEW = 16384;   // numbers that one thread does sooner than two

inline floats sigmoid(floats x) { return 1.0f / (1.0f + exponential(-x)); }

// Calls compute(at) for every whole group of numbers, and compute_rest(at, count) for the numbers after the last one.
template <class Group, class Rest>
inline void for_groups(int64_t count, const Group& compute, const Rest& compute_rest) {
#pragma omp parallel for schedule(static) if (count > FEW)
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    const int64_t end = begin + CHUNK < count ? begin + CHUNK : count;
    int64_t at = begin;
    for (; at + WIDTH <= end; at += WIDTH) compute(at);
    if (at < end) compute_rest(at, end - at);
  }
}

template <class T>
inline floats gated(floats gate, floats up) {
  return rounded<T>(gate * sigmoid(gate)) * up;
}

template <class T>
void forward(const T* gate, const T* up, T* out, int64_t count) {
  for_groups(
      count, [&](int64_t at) { store(out + at, gated<T>(load(gate + at), load(up + at))); },
      [&](int64_t at, int64_t rest) {
        store_some(out + at, gated<T>(load_some(gate + at, rest), load_some(up + at, rest)), rest);
      });
}

// With s = sigmoid(gate): d gate = grad up s (1 + gate (1 - s)), d up = silu(gate) grad.
template <class T>
inline floats of_gate(floats grad, floats gate, floats up) {
  const floats s = sigmoid(gate);
  return rounded<T>(grad * up) * s * (1.0f + gate * (1.0f - s));
}

template <class T>
void backward(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t count) {
  for_groups(
      count,
      [&](int64_t at) {
        const floats own = load(grad + at), g = load(gate + at);
        store(grad_gate + at, of_gate<T>(own, g, load(up + at)));
        store(grad_up + at, gated<T>(g, own));
      },
      [&](int64_t at, int64_t rest) {
        const floats own = load_some(grad + at, rest), g = load_some(gate + at, rest);
        store_some(grad_gate + at, of_gate<T>(own, g, load_some(up + at, rest)), rest);
        store_some(grad_up + at, gated<T>(g, own), rest);
      });
}

}  // namespace

// All tensors are contiguous with `count` numbers, bfloat16 if `is_narrow`, else float32.
extern "C" void whet_silu_gate(int is_narrow, const void* gate, const void* up, void* out, int64_t count) {
  if (is_narrow)
    forward(static_cast<const bfloat16*>(gate), static_cast<const bfloat16*>(up), static_cast<bfloat16*>(out), count);
  else
    forward(static_cast<const float*>(gate), static_cast<const float*>(up), static_cast<float*>(out), count);
}

extern "C" void whet_silu_gate_backward(int is_narrow, const void* grad, const void* gate, const void* up,
                                        void* grad_gate, void* grad_up, int64_t count) {
  if (is_narrow)
    backward(static_cast<const bfloat16*>(grad), static_cast<const bfloat16*>(gate), static_cast<const bfloat16*>(up),
             static_cast<bfloat16*>(grad_gate), static_cast<bfloat16*>(grad_up), count);
  else
    backward(static_cast<const float*>(grad), static_cast<const float*>(gate), static_cast<const float*>(up),
             static_cast<float*>(grad_gate), static_cast<float*>(grad_up), count);
}

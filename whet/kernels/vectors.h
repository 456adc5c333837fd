// SPDX-License-Identifier: Apache-2.0
// Float32 numbers that are read and written as float32 or bfloat16: one, or 16 that are computed at once, with their exp.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t WIDTH = 16;

using floats = float __attribute__((vector_size(4 * WIDTH)));
using words = int32_t __attribute__((vector_size(4 * WIDTH)));
using halves = uint16_t __attribute__((vector_size(2 * WIDTH)));
struct bfloat16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, sizeof(out));
  return out;
}

template <class T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) { return x; }
template <>
inline bfloat16 narrow<bfloat16>(float x) {  // to nearest, ties to even; what is not a number stays none
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  const uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0)};
}

inline floats load(const float* from) {
  floats out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline floats load(const bfloat16* from) {
  halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return reinterpret_cast<floats>(__builtin_convertvector(bits, words) << 16);
}

// Rounded to the numbers of a type, to nearest, ties to even; what is not a number stays none.
template <class T>
inline floats rounded(floats x);
template <>
inline floats rounded<float>(floats x) { return x; }
template <>
inline floats rounded<bfloat16>(floats x) {
  const words wide = reinterpret_cast<words>(x), even = (wide >> 16) & 1;
  const words bits = x == x ? (wide + 0x7fff + even) & ~0xffff : words{} + 0x7fc00000;
  return reinterpret_cast<floats>(bits);
}

inline void store(float* to, floats x) { std::memcpy(to, &x, sizeof(x)); }
inline void store(bfloat16* to, floats x) {
  const halves narrow = __builtin_convertvector(reinterpret_cast<words>(rounded<bfloat16>(x)) >> 16, halves);
  std::memcpy(to, &narrow, sizeof(narrow));
}

// The first `count` numbers of a group; the others are read as 0, and not written.
template <class T>
inline floats load_some(const T* from, int64_t count) {
  T whole[WIDTH] = {};
  std::memcpy(whole, from, count * sizeof(T));
  return load(whole);
}
template <class T>
inline void store_some(T* to, floats x, int64_t count) {
  T whole[WIDTH];
  store(whole, x);
  std::memcpy(to, whole, count * sizeof(T));
}

// A whole group, or the numbers before an end that is `left` away.
template <class T>
inline floats load_up_to(const T* from, int64_t left) {
  return left >= WIDTH ? load(from) : load_some(from, left);
}
template <class T>
inline void store_up_to(T* to, floats x, int64_t left) {
  left >= WIDTH ? store(to, x) : store_some(to, x, left);
}

// exp(x) as 2^n exp(r), |r| <= ln(2) / 2, with exp(r) by its Taylor polynomial: within 2 units in the last place.
// 0 below -87.3, where it is smaller than a normal number; infinite above 88.4.
inline floats exponential(floats x) {
  floats y = x < -87.3f ? floats{} - 87.3f : x;
  y = y > 89.0f ? floats{} + 89.0f : y;
  const floats shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to a whole number, in the low bits
  const floats whole = shifted - 12582912.0f;
  const floats rest = (y - whole * 0.693359375f) + whole * 2.12194440e-4f;
  floats series = rest * (1.0f / 5040) + 1.0f / 720;
  series = series * rest + 1.0f / 120;
  series = series * rest + 1.0f / 24;
  series = series * rest + 1.0f / 6;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  const words power = (reinterpret_cast<words>(shifted) - 0x4b400000 + 127) << 23;
  return x < -87.3f ? floats{} : series * reinterpret_cast<floats>(power);
}

}  // namespace

// SPDX-License-Identifier: Apache-2.0
// Attention of a flat batch of tokens over a block KV cache.
//
// Each (token, key-value head) is computed by one thread in one fixed order over its own keys, so the result does not
// depend on what else is in the batch: that is what makes a request alone and a request among others give equal bits.
// Prefill and decode are the same call; a token attends to positions 0..its own of its sequence.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;  // tokens in a block, and floats in a vector: one vector holds one score of each token
using floats = float __attribute__((vector_size(64)));
using words = uint32_t __attribute__((vector_size(64)));
using halves = uint16_t __attribute__((vector_size(32)));

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

inline floats load(const float* from) {
  floats out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline floats load(const bfloat16* from) {
  halves narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  const words wide = __builtin_convertvector(narrow, words) << 16;
  floats out;
  std::memcpy(&out, &wide, sizeof(out));
  return out;
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bfloat16* out) {  // to nearest, ties to even
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  out->bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

struct Shape {
  int64_t tokens, heads, kv_heads, head_dim, table_width, window;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides in elements
  int64_t group() const { return heads / kv_heads; }
  int64_t head_stride() const { return LANES * head_dim; }
  int64_t block_stride() const { return kv_heads * head_stride(); }
};

// One token's query heads that share a key-value head, against the positions begin..end of its sequence.
// `keys` and `values` point at that head in block 0; `scores` has room for G * blocks * LANES floats.
template <typename T, int G>
struct Attention {
  const Shape& shape;
  const T *keys, *values;
  const int32_t* table;
  int64_t begin, end;
  float* scores;
  int64_t first() const { return begin / LANES; }
  int64_t last() const { return (end + LANES - 1) / LANES; }
  float* row(int g) const { return scores + g * (last() - first()) * LANES; }

  // scores[g][position] = query[g] . key[position]; keys lie as [head_dim][LANES], so no sum runs across a vector.
  void score(const float* query) const {
    for (int64_t b = first(); b < last(); ++b) {
      const T* block = keys + table[b] * shape.block_stride();
      floats sums[G] = {};
      for (int64_t i = 0; i < shape.head_dim; ++i) {
        const floats key = load(block + i * LANES);
        for (int g = 0; g < G; ++g) sums[g] += query[g * shape.head_dim + i] * key;
      }
      for (int g = 0; g < G; ++g) std::memcpy(row(g) + (b - first()) * LANES, &sums[g], sizeof(floats));
    }
  }

  // Turns scores into weights in place, zero outside begin..end, and returns one over their sum.
  float softmax(int g) const {
    float* weights = row(g) - first() * LANES;  // indexed by position
    std::fill(weights + first() * LANES, weights + begin, -INFINITY);
    std::fill(weights + end, weights + last() * LANES, -INFINITY);
    float largest = -INFINITY, total = 0.f;
#pragma omp simd reduction(max : largest)
    for (int64_t j = begin; j < end; ++j) largest = std::max(largest, weights[j]);
#pragma omp simd reduction(+ : total)
    for (int64_t j = first() * LANES; j < last() * LANES; ++j) {
      weights[j] = std::exp(weights[j] - largest);
      total += weights[j];
    }
    return 1.f / total;
  }

  // out[g] = sum over positions of weight * value, C vectors of the head at a time.
  template <int C>
  void mix(const float* inverse, T* out) const {
    for (int64_t part = 0; part < shape.head_dim; part += C * LANES) {
      floats sums[G][C] = {};
      for (int64_t j = begin; j < end; ++j) {
        const T* value = values + table[j / LANES] * shape.block_stride() + (j % LANES) * shape.head_dim + part;
        for (int c = 0; c < C; ++c) {
          const floats piece = load(value + c * LANES);
          for (int g = 0; g < G; ++g) sums[g][c] += row(g)[j - first() * LANES] * piece;
        }
      }
      for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c)
          for (int i = 0; i < LANES; ++i) narrow(sums[g][c][i] * inverse[g], out + g * shape.head_dim + part + c * LANES + i);
    }
  }

  void run(const T* q, float scale, float* query, T* out) const {
    for (int g = 0; g < G; ++g)
      for (int64_t i = 0; i < shape.head_dim; ++i) query[g * shape.head_dim + i] = widen(q[g * shape.q_head + i]) * scale;
    score(query);
    float inverse[G];
    for (int g = 0; g < G; ++g) inverse[g] = softmax(g);
    if (shape.head_dim % (4 * LANES) == 0)
      mix<4>(inverse, out);
    else
      mix<1>(inverse, out);
  }
};

// Puts one token's key (transposed) and value into its block.
template <typename T>
void remember(const T* k, const T* v, T* keys, T* values, int64_t slot, const Shape& shape) {
  for (int64_t h = 0; h < shape.kv_heads; ++h) {
    for (int64_t i = 0; i < shape.head_dim; ++i) keys[h * shape.head_stride() + i * LANES + slot] = k[h * shape.k_head + i];
    std::memcpy(values + h * shape.head_stride() + slot * shape.head_dim, v + h * shape.v_head, shape.head_dim * sizeof(T));
  }
}

template <typename T>
void run(const T* q, const T* k, const T* v, T* keys, T* values, const int32_t* tables, const int32_t* rows,
         const int64_t* positions, T* out, const Shape& shape, float scale) {
  const int64_t group = shape.group(), dim = shape.head_dim;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < shape.tokens; ++t) {
      if (rows[t] < 0) continue;  // padding
      const int64_t block = tables[rows[t] * shape.table_width + positions[t] / LANES] * shape.block_stride();
      remember(k + t * shape.k_token, v + t * shape.v_token, keys + block, values + block, positions[t] % LANES, shape);
    }
    std::vector<float> scores, query(4 * dim);
#pragma omp for schedule(dynamic, 4)
    for (int64_t unit = 0; unit < shape.tokens * shape.kv_heads; ++unit) {
      const int64_t t = unit / shape.kv_heads, h = unit % shape.kv_heads;
      T* target = out + (t * shape.heads + h * group) * dim;
      if (rows[t] < 0) {
        std::memset(static_cast<void*>(target), 0, group * dim * sizeof(T));
        continue;
      }
      const int64_t end = positions[t] + 1, begin = shape.window > 0 ? std::max<int64_t>(0, end - shape.window) : 0;
      scores.resize(std::max<size_t>(scores.size(), 4 * (end - begin + 2 * LANES)));
      const T* from = q + t * shape.q_token + h * group * shape.q_head;
      const T *key_head = keys + h * shape.head_stride(), *value_head = values + h * shape.head_stride();
      const int32_t* table = tables + rows[t] * shape.table_width;
      for (int64_t g = 0; g < group;) {
        const auto part = [&](auto size) {
          constexpr int G = decltype(size)::value;
          const Attention<T, G> attention{shape, key_head, value_head, table, begin, end, scores.data()};
          attention.run(from + g * shape.q_head, scale, query.data(), target + g * dim);
          g += G;
        };
        if (group - g >= 4)
          part(std::integral_constant<int, 4>());
        else if (group - g >= 2)
          part(std::integral_constant<int, 2>());
        else
          part(std::integral_constant<int, 1>());
      }
    }
  }
}

}  // namespace

// `sizes`: the twelve numbers of Shape, in order. The head size is a multiple of 16; blocks hold 16 tokens.
extern "C" void whet_paged_attention(int is_bfloat16, const void* q, const void* k, const void* v, void* keys, void* values,
                                     const int32_t* tables, const int32_t* rows, const int64_t* positions, void* out,
                                     const int64_t* sizes, float scale) {
  Shape shape;
  static_assert(sizeof(Shape) == 12 * sizeof(int64_t), "sizes are copied as they are");
  std::memcpy(&shape, sizes, sizeof(shape));
  const auto run_as = [&](auto type) {
    using T = decltype(type);
    run(static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(keys),
        static_cast<T*>(values), tables, rows, positions, static_cast<T*>(out), shape, scale);
  };
  if (is_bfloat16)
    run_as(bfloat16());
  else
    run_as(float());
}

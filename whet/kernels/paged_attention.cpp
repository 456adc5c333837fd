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

constexpr int64_t LANES = 16;  // tokens in a block, and numbers in `floats`: it holds one score of each token

// A vector register of this processor, as it is compiled for: `floats` are a few of them. SUMS `floats` are summed side by
// side, which hides the latency of a sum, and leaves registers for what is added. Neither changes a result: each sum has
// its own order.
#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16, SUMS = 8;
#elif defined(__AVX__)
constexpr int64_t WIDTH = 8, SUMS = 4;
#else
constexpr int64_t WIDTH = 4, SUMS = 2;
#endif
constexpr int64_t PARTS = LANES / WIDTH;
using part = float __attribute__((vector_size(4 * WIDTH)));
using words = uint32_t __attribute__((vector_size(4 * WIDTH)));
using halves = uint16_t __attribute__((vector_size(2 * WIDTH)));

struct floats {
  part parts[PARTS];
};

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

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bfloat16* to) {  // to nearest, ties to even
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  to->bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <typename To, typename From>
inline To read(const From* from) {
  To out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
inline void load(part& to, const float* from) { to = read<part>(from); }
inline void load(part& to, const bfloat16* from) {
  const words wide = __builtin_convertvector(read<halves>(from), words) << 16;
  to = read<part>(&wide);
}
inline void store(part x, float* to) { std::memcpy(to, &x, sizeof(x)); }
inline void store(part x, bfloat16* to) {  // to nearest, ties to even
  const words wide = read<words>(&x);
  const halves narrow = __builtin_convertvector((wide + 0x7fff + ((wide >> 16) & 1)) >> 16, halves);
  std::memcpy(to, &narrow, sizeof(narrow));
}

template <typename T>
inline floats load(const T* from) {
  floats out;
  for (int64_t p = 0; p < PARTS; ++p) load(out.parts[p], from + p * WIDTH);
  return out;
}
template <typename T>
inline void store(const floats& x, float factor, T* to) {
  for (int64_t p = 0; p < PARTS; ++p) store(x.parts[p] * factor, to + p * WIDTH);
}
inline void add_product(floats& sum, float factor, const floats& x) {
  for (int64_t p = 0; p < PARTS; ++p) sum.parts[p] += factor * x.parts[p];
}

inline float largest_of(const float* x) {
  float largest = x[0];
  for (int i = 1; i < LANES; ++i) largest = std::max(largest, x[i]);
  return largest;
}
inline float sum_of(const float* x) {
  float total = x[0];
  for (int i = 1; i < LANES; ++i) total += x[i];
  return total;
}

// e^x for x <= 0, relative error below 2e-7, 0 below -87. (libm's is scalar here: its vector form needs -ffast-math.)
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series, 2^n by the exponent's bits.
inline part exp(part x) {
  const part zero = {}, lowest = zero - 87.f, kept = x < lowest ? lowest : x;
  constexpr float shifter = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits then hold
  const part shifted = kept * 1.44269504f + shifter, n = shifted - shifter;
  const part r = (kept - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts, the first short
  part sum = zero + 1.f / 5040;
  for (const float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) sum = sum * r + factor;
  const words bits = read<words>(&sum) + (read<words>(&shifted) << 23);
  return x < lowest ? zero : x == x ? read<part>(&bits) : x;
}

struct Shape {
  int64_t tokens, heads, kv_heads, head_dim, value_dim, table_width, window;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides in elements
  int64_t group() const { return heads / kv_heads; }
  int64_t key_stride() const { return LANES * head_dim; }  // of a head in a block
  int64_t value_stride() const { return LANES * value_dim; }
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

  // scores[g][position] = query[g] . key[position] for B blocks at once, so that enough sums are under way to hide the
  // latency of each; keys lie as [head_dim][LANES], so no sum runs across a vector.
  // While it works on these it asks for the blocks that come next: they lie anywhere.
  template <int B>
  void score_blocks(const float* query, int64_t b) const {
    const T *block[B], *next[B];
    for (int n = 0; n < B; ++n) {
      block[n] = keys + table[b + n] * shape.kv_heads * shape.key_stride();
      next[n] = keys + table[std::min(b + B + n, last() - 1)] * shape.kv_heads * shape.key_stride();
    }
    floats sums[B][G] = {};
    for (int64_t i = 0; i < shape.head_dim; ++i)
      for (int n = 0; n < B; ++n) {
        __builtin_prefetch(next[n] + i * LANES);
        const floats key = load(block[n] + i * LANES);
        for (int g = 0; g < G; ++g) add_product(sums[n][g], query[g * shape.head_dim + i], key);
      }
    for (int n = 0; n < B; ++n)
      for (int g = 0; g < G; ++g) store(sums[n][g], 1.f, row(g) + (b + n - first()) * LANES);
  }

  void score(const float* query) const {
    constexpr int B = std::max<int>(1, SUMS / G);
    int64_t b = first();
    for (; b + B <= last(); b += B) score_blocks<B>(query, b);
    for (; b < last(); ++b) score_blocks<1>(query, b);
  }

  // Turns scores into weights in place, zero outside begin..end, and returns one over their sum and that of the sink.
  float softmax(int g, float sink) const {
    float* weights = row(g) - first() * LANES;  // indexed by position
    std::fill(weights + first() * LANES, weights + begin, -INFINITY);
    std::fill(weights + end, weights + last() * LANES, -INFINITY);
    float tops[LANES], totals[LANES] = {};
    std::fill(tops, tops + LANES, -INFINITY);
    for (int64_t p = 0; p < LANES; p += WIDTH) {
      part top = read<part>(tops);
      for (int64_t j = first() * LANES; j < last() * LANES; j += LANES) {
        const part scores = read<part>(weights + j + p);
        top = scores > top ? scores : top;
      }
      store(top, tops + p);
    }
    const float largest = std::max(largest_of(tops), sink);
    for (int64_t p = 0; p < LANES; p += WIDTH) {
      part total = {};
      for (int64_t j = first() * LANES; j < last() * LANES; j += LANES) {
        const part weight = exp(read<part>(weights + j + p) - largest);
        store(weight, weights + j + p);
        total += weight;
      }
      store(total, totals + p);
    }
    return 1.f / (sum_of(totals) + std::exp(sink - largest));
  }

  // out[g] = sum over positions of weight * value, C vectors of the head at a time.
  template <int C>
  void mix(const float* inverse, T* out) const {
    for (int64_t part = 0; part < shape.value_dim; part += C * LANES) {
      floats sums[G][C] = {};
      for (int64_t b = first(); b < last(); ++b) {
        const T* block = values + table[b] * shape.kv_heads * shape.value_stride() + part;
        const T* next = values + table[std::min(b + 1, last() - 1)] * shape.kv_heads * shape.value_stride() + part;
        const int64_t stop = std::min(end, (b + 1) * LANES);
        for (int64_t j = std::max(begin, b * LANES); j < stop; ++j) {
          for (int c = 0; c < C; ++c) {
            __builtin_prefetch(next + (j % LANES) * shape.value_dim + c * LANES);
            const floats piece = load(block + (j % LANES) * shape.value_dim + c * LANES);
            for (int g = 0; g < G; ++g) add_product(sums[g][c], row(g)[j - first() * LANES], piece);
          }
        }
      }
      for (int g = 0; g < G; ++g)
        for (int c = 0; c < C; ++c) store(sums[g][c], inverse[g], out + g * shape.value_dim + part + c * LANES);
    }
  }

  // The same where there are no values but the first numbers of the keys. What lies outside begin..end may be anything.
  void mix_keys(const float* inverse, T* out) const {
    for (int64_t i = 0; i < shape.value_dim; ++i) {
      floats sums[G] = {};
      for (int64_t b = first(); b < last(); ++b) {
        floats piece = load(keys + table[b] * shape.kv_heads * shape.key_stride() + i * LANES);
        if (b * LANES < begin || (b + 1) * LANES > end) {
          float kept[LANES];
          store(piece, 1.f, kept);
          for (int64_t j = 0; j < LANES; ++j)
            if (b * LANES + j < begin || b * LANES + j >= end) kept[j] = 0.f;
          piece = load(kept);
        }
        for (int g = 0; g < G; ++g) {
          const floats weights = load(row(g) + (b - first()) * LANES);
          for (int64_t p = 0; p < PARTS; ++p) sums[g].parts[p] += weights.parts[p] * piece.parts[p];
        }
      }
      for (int g = 0; g < G; ++g) {
        float lanes[LANES];
        store(sums[g], inverse[g], lanes);
        narrow(sum_of(lanes), out + g * shape.value_dim + i);
      }
    }
  }

  void run(const T* q, float scale, float cap, const float* sinks, float* query, T* out) const {
    for (int g = 0; g < G; ++g)
      for (int64_t i = 0; i < shape.head_dim; ++i) query[g * shape.head_dim + i] = widen(q[g * shape.q_head + i]) * scale;
    score(query);
    if (cap > 0)
      for (int64_t j = 0; j < G * (last() - first()) * LANES; ++j) scores[j] = cap * std::tanh(scores[j] / cap);
    float inverse[G];
    for (int g = 0; g < G; ++g) inverse[g] = softmax(g, sinks ? sinks[g] : -INFINITY);
    constexpr int C = std::clamp<int>(SUMS / G, 1, 4);
    if (values == nullptr)
      mix_keys(inverse, out);
    else if (shape.value_dim % (C * LANES) == 0)
      mix<C>(inverse, out);
    else
      mix<1>(inverse, out);
  }
};

// Puts one token's key (transposed) and value into its block.
template <typename T>
void remember(const T* k, const T* v, T* keys, T* values, int64_t slot, const Shape& shape) {
  for (int64_t h = 0; h < shape.kv_heads; ++h) {
    for (int64_t i = 0; i < shape.head_dim; ++i) keys[h * shape.key_stride() + i * LANES + slot] = k[h * shape.k_head + i];
    if (values != nullptr)
      std::memcpy(values + h * shape.value_stride() + slot * shape.value_dim, v + h * shape.v_head, shape.value_dim * sizeof(T));
  }
}

template <typename T>
void run(const T* q, const T* k, const T* v, T* keys, T* values, const int32_t* tables, const int32_t* rows,
         const int64_t* positions, T* out, const Shape& shape, float scale, float cap, const float* sinks) {
  const int64_t group = shape.group(), dim = shape.value_dim;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < shape.tokens; ++t) {
      if (rows[t] < 0) continue;  // padding
      const int64_t head = tables[rows[t] * shape.table_width + positions[t] / LANES] * shape.kv_heads;
      T *key_block = keys + head * shape.key_stride(), *value_block = values ? values + head * shape.value_stride() : nullptr;
      remember(k + t * shape.k_token, v + t * shape.v_token, key_block, value_block, positions[t] % LANES, shape);
    }
    std::vector<float> scores, query(4 * shape.head_dim);
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
      const T *key_head = keys + h * shape.key_stride(), *value_head = values ? values + h * shape.value_stride() : nullptr;
      const int32_t* table = tables + rows[t] * shape.table_width;
      for (int64_t g = 0; g < group;) {
        const auto part = [&](auto size) {
          constexpr int G = decltype(size)::value;
          const Attention<T, G> attention{shape, key_head, value_head, table, begin, end, scores.data()};
          const float* own_sinks = sinks ? sinks + h * group + g : nullptr;
          attention.run(from + g * shape.q_head, scale, cap, own_sinks, query.data(), target + g * dim);
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

// `sizes`: the thirteen numbers of Shape, in order. Sizes of heads are multiples of 16; blocks hold 16 tokens.
// Without `values` they are the first numbers of the keys. Scores s become cap tanh(s / cap) where cap > 0. `sinks`: a score of each head without a value, or null.
extern "C" void whet_paged_attention(int is_bfloat16, const void* q, const void* k, const void* v, void* keys, void* values,
                                     const int32_t* tables, const int32_t* rows, const int64_t* positions, void* out,
                                     const int64_t* sizes, float scale, float cap, const float* sinks) {
  Shape shape;
  static_assert(sizeof(Shape) == 13 * sizeof(int64_t), "sizes are copied as they are");
  std::memcpy(&shape, sizes, sizeof(shape));
  const auto run_as = [&](auto type) {
    using T = decltype(type);
    run(static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(keys),
        static_cast<T*>(values), tables, rows, positions, static_cast<T*>(out), shape, scale, cap, sinks);
  };
  if (is_bfloat16)
    run_as(bfloat16());
  else
    run_as(float());
}

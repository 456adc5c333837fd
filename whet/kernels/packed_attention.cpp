// SPDX-License-Identifier: Apache-2.0
// Causal attention over packed rows of few tokens, and its gradients, without padding. Sums are float32 and in one order
// for each query, so that a row's result does not depend on what else is in the batch.
//
// A row has m own tokens, which are its queries, next to each other in the batch. Its S keys are the tokens of a prompt
// that it shares with other rows, if any, then its own.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <omp.h>

#include "vectors.h"

namespace {

constexpr int GROUPS = 8;  // of keys: a row has at most GROUPS * WIDTH

inline int64_t whole(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

template <class T>
inline void widen(const T* from, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += WIDTH) store(to + d, load_up_to(from + d, dim - d));
}

template <class T>
inline void narrow(const float* from, int64_t dim, T* to) {
  for (int64_t d = 0; d < dim; d += WIDTH) store_up_to(to + d, load(from + d), dim - d);
}

struct Sizes {
  int64_t heads, kv_heads, dim, value_dim;
  float scale;
  int64_t window;  // 0: none
};

struct Rows {
  const int64_t* own;      // [rows + 1] where the own tokens of each row begin
  const int64_t* shared;   // [rows + 1] where its part of `prompts` begins
  const int64_t* prompts;  // the tokens of shared prompts, row after row
};

// One key head of a row in float32: keys and values by token, and by dimension with the tokens in groups. Only the
// gradients read values by dimension.
struct Row {
  int64_t shared, own, count, stride;  // keys of the shared prompt, own tokens, all keys, and these in whole groups
  std::vector<float> keys, values, key_columns, value_columns;

  template <class T>
  static void read(const T* from, const Rows& rows, int64_t row, int64_t heads, int64_t head, int64_t dim,
                   std::vector<float>& by_token) {
    const int64_t shared = rows.shared[row + 1] - rows.shared[row], own = rows.own[row + 1] - rows.own[row];
    const int64_t width = whole(dim);
    by_token.resize((shared + own) * width);
    for (int64_t j = 0; j < shared + own; ++j) {
      const int64_t token = j < shared ? rows.prompts[rows.shared[row] + j] : rows.own[row] + j - shared;
      widen(from + (token * heads + head) * dim, dim, &by_token[j * width]);
    }
  }

  void turn(const std::vector<float>& by_token, int64_t dim, std::vector<float>& by_dimension) const {
    const int64_t width = whole(dim);
    by_dimension.assign(dim * stride, 0.0f);
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t j = 0; j < count; ++j) by_dimension[d * stride + j] = by_token[j * width + d];
  }

  template <class T>
  void read(const T* key, const T* value, const Rows& rows, int64_t row, int64_t head, const Sizes& sizes,
            bool for_gradients) {
    shared = rows.shared[row + 1] - rows.shared[row];
    own = rows.own[row + 1] - rows.own[row];
    count = shared + own;
    stride = whole(count);
    read(key, rows, row, sizes.kv_heads, head, sizes.dim, keys);
    read(value, rows, row, sizes.kv_heads, head, sizes.value_dim, values);
    turn(keys, sizes.dim, key_columns);
    if (for_gradients) turn(values, sizes.value_dim, value_columns);
  }

  // 1 for the keys that the row's query with this number reads, as a mask for the group of keys `group`.
  words seen(int64_t query, int64_t group, int64_t window) const {
    words at;
    for (int64_t i = 0; i < WIDTH; ++i) at[i] = static_cast<int32_t>(group * WIDTH + i);
    const auto last = static_cast<int32_t>(shared + query);
    const int32_t first = window ? std::max<int32_t>(0, last - static_cast<int32_t>(window) + 1) : 0;
    return (at <= last) & (at >= first);
  }
};

// out[j] = sum over d of x[d] columns[d][j], for groups of j whose number is known to the compiler: the sums stay in
// registers.
template <int64_t groups>
inline void times_groups(const float* x, const float* columns, int64_t dim, int64_t stride, floats* out) {
  floats sums[groups] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const floats factor = floats{} + x[d];
    for (int64_t group = 0; group < groups; ++group) sums[group] += factor * load(columns + d * stride + group * WIDTH);
  }
  for (int64_t group = 0; group < groups; ++group) out[group] = sums[group];
}

inline void times(const float* x, const float* columns, int64_t dim, int64_t stride, int64_t groups, floats* out) {
  for (; groups > 2; groups -= 2, columns += 2 * WIDTH, out += 2) times_groups<2>(x, columns, dim, stride, out);
  groups == 2 ? times_groups<2>(x, columns, dim, stride, out) : times_groups<1>(x, columns, dim, stride, out);
}

// out[d] += sum over j of x[j] rows[j][d].
inline void add_times(const float* x, const float* rows, int64_t count, int64_t width, float* out) {
  for (int64_t d = 0; d < width; d += WIDTH) {
    floats sum = load(out + d);
    for (int64_t j = 0; j < count; ++j) sum += x[j] * load(rows + j * width + d);
    store(out + d, sum);
  }
}

// rows[j][d] += x[j] y[d].
inline void add_product(const float* x, const float* y, int64_t count, int64_t width, float* rows) {
  for (int64_t d = 0; d < width; d += WIDTH) {
    const floats part = load(y + d);
    for (int64_t j = 0; j < count; ++j) store(rows + j * width + d, load(rows + j * width + d) + x[j] * part);
  }
}

// The halves of x are joined until one number is left.
template <class Join>
inline float joined(const floats& x, const Join& join) {
  float left[WIDTH];
  store(left, x);
  for (int64_t half = WIDTH / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) left[i] = join(left[i], left[i + half]);
  return left[0];
}
inline float greatest(const floats& x) {
  return joined(x, [](float one, float other) { return one > other ? one : other; });
}
inline float sum_of(const floats& x) {
  return joined(x, [](float one, float other) { return one + other; });
}

template <class T>
void forward(const T* query, const T* key, const T* value, T* out, float* log_sums, const Rows& rows, int64_t count,
             const Sizes& sizes) {
  const int64_t per_key = sizes.heads / sizes.kv_heads, dim = sizes.dim, value_dim = sizes.value_dim;
#pragma omp parallel
  {
    Row row;
    std::vector<float> q(whole(dim)), o(whole(value_dim));
    alignas(64) float probs[GROUPS * WIDTH];
    floats scores[GROUPS];
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < count * sizes.kv_heads; ++task) {
      const int64_t number = task / sizes.kv_heads, kv_head = task % sizes.kv_heads;
      if (rows.own[number + 1] == rows.own[number]) continue;
      row.read(key, value, rows, number, kv_head, sizes, false);
      for (int64_t i = 0; i < row.own; ++i) {
        const int64_t visible = row.shared + i + 1, groups = whole(visible) / WIDTH;
        for (int64_t head = kv_head * per_key; head < (kv_head + 1) * per_key; ++head) {
          const int64_t place = (rows.own[number] + i) * sizes.heads + head;
          widen(query + place * dim, dim, q.data());
          times(q.data(), row.key_columns.data(), dim, row.stride, groups, scores);
          floats most = floats{} - std::numeric_limits<float>::infinity(), total{};
          for (int64_t g = 0; g < groups; ++g) {
            const floats hidden = floats{} - std::numeric_limits<float>::infinity();
            scores[g] = row.seen(i, g, sizes.window) ? scores[g] * sizes.scale : hidden;
            most = scores[g] > most ? scores[g] : most;
          }
          const float top = greatest(most);
          for (int64_t g = 0; g < groups; ++g) {
            scores[g] = exponential(scores[g] - top);
            total += scores[g];
          }
          const float sum = sum_of(total);
          for (int64_t g = 0; g < groups; ++g) store(probs + g * WIDTH, scores[g] / sum);
          std::fill(o.begin(), o.end(), 0.0f);
          add_times(probs, row.values.data(), visible, whole(value_dim), o.data());
          narrow(o.data(), value_dim, out + place * value_dim);
          log_sums[place] = top + std::log(sum);
        }
      }
    }
  }
}

// The gradients of own keys and values are written to grad_key and grad_value, those of shared prompts to parts_key and
// parts_value, in the order of `prompts`: several rows may have the same prompt.
template <class T>
void backward(const T* grad, const T* query, const T* key, const T* value, const float* log_sums, T* grad_query,
              float* grad_key, float* grad_value, float* parts_key, float* parts_value, const Rows& rows,
              int64_t count, const Sizes& sizes) {
  const int64_t per_key = sizes.heads / sizes.kv_heads, dim = sizes.dim, value_dim = sizes.value_dim;
  const int64_t width = whole(dim), value_width = whole(value_dim);
#pragma omp parallel
  {
    Row row;
    std::vector<float> q(width), own(value_width), of_query(width), of_keys, of_values;
    alignas(64) float probs[GROUPS * WIDTH], slopes[GROUPS * WIDTH];
    floats scores[GROUPS], along[GROUPS];
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < count * sizes.kv_heads; ++task) {
      const int64_t number = task / sizes.kv_heads, kv_head = task % sizes.kv_heads;
      if (rows.own[number + 1] == rows.own[number]) continue;
      row.read(key, value, rows, number, kv_head, sizes, true);
      of_keys.assign(row.count * width, 0.0f);
      of_values.assign(row.count * value_width, 0.0f);
      for (int64_t i = 0; i < row.own; ++i) {
        const int64_t visible = row.shared + i + 1, groups = whole(visible) / WIDTH;
        for (int64_t head = kv_head * per_key; head < (kv_head + 1) * per_key; ++head) {
          const int64_t place = (rows.own[number] + i) * sizes.heads + head;
          widen(query + place * dim, dim, q.data());
          widen(grad + place * value_dim, value_dim, own.data());
          times(q.data(), row.key_columns.data(), dim, row.stride, groups, scores);
          times(own.data(), row.value_columns.data(), value_dim, row.stride, groups, along);
          floats mean{};
          for (int64_t g = 0; g < groups; ++g) {
            const floats prob = exponential(scores[g] * sizes.scale - log_sums[place]);
            scores[g] = row.seen(i, g, sizes.window) ? prob : floats{};
            mean += scores[g] * along[g];
            store(probs + g * WIDTH, scores[g]);
          }
          const float middle = sum_of(mean);
          for (int64_t g = 0; g < groups; ++g)
            store(slopes + g * WIDTH, scores[g] * (along[g] - middle) * sizes.scale);
          std::fill(of_query.begin(), of_query.end(), 0.0f);
          add_times(slopes, row.keys.data(), visible, width, of_query.data());
          narrow(of_query.data(), dim, grad_query + place * dim);
          add_product(slopes, q.data(), visible, width, of_keys.data());
          add_product(probs, own.data(), visible, value_width, of_values.data());
        }
      }
      for (int64_t j = 0; j < row.count; ++j) {
        const bool is_shared = j < row.shared;
        const int64_t token = is_shared ? rows.shared[number] + j : rows.own[number] + j - row.shared;
        const int64_t place = token * sizes.kv_heads + kv_head;
        narrow(&of_keys[j * width], dim, (is_shared ? parts_key : grad_key) + place * dim);
        narrow(&of_values[j * value_width], value_dim, (is_shared ? parts_value : grad_value) + place * value_dim);
      }
    }
  }
}

}  // namespace

// query [n, heads, dim], key [K, kv_heads, dim], value [K, kv_heads, value_dim], out [n, heads, value_dim] are
// contiguous, bfloat16 if `is_narrow`, else float32; log_sums [n, heads] float32. `rows` counts the rows.
extern "C" void whet_packed_attention(int is_narrow, const void* query, const void* key, const void* value, void* out,
                                     float* log_sums, const int64_t* own, const int64_t* shared, const int64_t* prompts,
                                     int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t value_dim,
                                     int64_t window, float scale) {
  const Sizes sizes{heads, kv_heads, dim, value_dim, scale, window};
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    forward(static_cast<const T*>(query), static_cast<const T*>(key), static_cast<const T*>(value),
            static_cast<T*>(out), log_sums, {own, shared, prompts}, rows, sizes);
  };
  is_narrow ? run(static_cast<bfloat16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

extern "C" void whet_packed_attention_backward(
    int is_narrow, const void* grad, const void* query, const void* key, const void* value, const float* log_sums,
    void* grad_query, float* grad_key, float* grad_value, float* parts_key, float* parts_value, const int64_t* own,
    const int64_t* shared, const int64_t* prompts, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
    int64_t value_dim, int64_t window, float scale) {
  const Sizes sizes{heads, kv_heads, dim, value_dim, scale, window};
  const auto run = [&](auto* as) {
    using T = std::remove_pointer_t<decltype(as)>;
    backward(static_cast<const T*>(grad), static_cast<const T*>(query), static_cast<const T*>(key),
             static_cast<const T*>(value), log_sums, static_cast<T*>(grad_query), grad_key, grad_value, parts_key,
             parts_value, {own, shared, prompts}, rows, sizes);
  };
  is_narrow ? run(static_cast<bfloat16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

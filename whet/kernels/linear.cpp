// SPDX-License-Identifier: Apache-2.0
// Products of float32 matrices for linear layers, for processors with AVX2 and no wider registers.
//
// Each number is a sum of sums over blocks of the depth, in one order, whatever the number of rows and of threads is: so
// a row has equal bits alone and among others. The blocks are those of MKL on an AMD processor, and so are the bits.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t WIDTH = 8;               // floats in a register
constexpr int64_t ROWS = 6, PARTS = 2;     // 12 registers of sums, of 16; PARTS registers hold what a column adds
constexpr int64_t COLUMNS = PARTS * WIDTH;
constexpr int64_t BLOCK = 192;             // of the depth, summed by itself: errors grow with the length of a sum
constexpr int64_t CHUNK = 96;              // rows that a thread takes at a time
constexpr int64_t TALL = 192;              // columns of x that a thread takes at a time
constexpr int64_t FEW = 1 << 18;           // products that one thread does sooner than two
constexpr int64_t MANY = 4 * CHUNK;        // rows of a thread from which on it packs all columns of its own
constexpr int64_t HELD = 1 << 16;          // numbers of packed columns that stay near the processor beside the rows
using part = float __attribute__((vector_size(4 * WIDTH)));

inline part load(const float* from) {
  part out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

// Eight rows of eight floats, `stride` apart, as eight columns, COLUMNS apart.
inline void transpose(const float* from, int64_t stride, float* to) {
#ifdef __AVX__
  __m256 rows[8], pairs[8], fours[8];
  for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + i * stride);
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int n = 0; n < 2; ++n) {
      fours[i + 2 * n] = _mm256_shuffle_ps(pairs[i + n], pairs[i + n + 2], 0x44);
      fours[i + 2 * n + 1] = _mm256_shuffle_ps(pairs[i + n], pairs[i + n + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * COLUMNS, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * COLUMNS, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i)
    for (int c = 0; c < 8; ++c) to[i * COLUMNS + c] = from[c * stride + i];
#endif
}

// Up to COLUMNS columns of a factor [depth, columns] as [depth, COLUMNS], zero where there are fewer.
void pack(const float* from, int64_t stride, int64_t columns, int64_t depth, float* to) {
  if (columns == COLUMNS) {
    for (int64_t i = 0; i < depth; ++i) std::memcpy(to + i * COLUMNS, from + i * stride, COLUMNS * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < depth; ++i) {
    std::memcpy(to + i * COLUMNS, from + i * stride, columns * sizeof(float));
    std::fill(to + i * COLUMNS + columns, to + (i + 1) * COLUMNS, 0.0f);
  }
}

// The same of a factor that lies transposed, [columns, depth].
void pack_transposed(const float* from, int64_t stride, int64_t columns, int64_t depth, float* to) {
  if (columns < COLUMNS) std::fill(to, to + depth * COLUMNS, 0.0f);
  const int64_t whole_columns = columns / WIDTH * WIDTH, whole_depth = depth / WIDTH * WIDTH;
  for (int64_t c = 0; c < whole_columns; c += WIDTH)
    for (int64_t i = 0; i < whole_depth; i += WIDTH) transpose(from + c * stride + i, stride, to + i * COLUMNS + c);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = c < whole_columns ? whole_depth : 0; i < depth; ++i) to[i * COLUMNS + c] = from[c * stride + i];
}

inline int64_t block_of(int64_t depth) { return depth > BLOCK && depth < 2 * BLOCK ? depth / 2 : BLOCK; }

// R rows of x with the packed columns.
template <int R>
void tile(const float* x, const float* packed, const float* bias, float* out, int64_t depth, int64_t stride,
          int64_t columns) {
  float found[R][COLUMNS] = {};
  if (bias != nullptr)
    for (int r = 0; r < R; ++r) std::memcpy(found[r], bias, columns * sizeof(float));
  const int64_t block = block_of(depth);
  for (int64_t first = 0; first < depth; first += block) {
    part sums[R][PARTS] = {};
    const int64_t last = std::min(depth, first + block);
    for (int64_t i = first; i < last; ++i) {
      part factors[PARTS];
      for (int p = 0; p < PARTS; ++p) factors[p] = load(packed + i * COLUMNS + p * WIDTH);
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < PARTS; ++p) sums[r][p] += x[r * depth + i] * factors[p];
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < PARTS; ++p) {
        const part sum = load(found[r] + p * WIDTH) + sums[r][p];
        std::memcpy(found[r] + p * WIDTH, &sum, sizeof(sum));
      }
  }
  for (int r = 0; r < R; ++r) std::memcpy(out + r * stride, found[r], columns * sizeof(float));
}

// `out` += ROWS columns of x, packed as [depth, ROWS], with the packed columns of the other factor, over one block.
void add_tile(const float* x, const float* packed, float* out, int64_t depth, int64_t stride, int64_t rows,
              int64_t columns, bool is_first) {
  part sums[ROWS][PARTS] = {};
  for (int64_t i = 0; i < depth; ++i) {
    part factors[PARTS];
    for (int p = 0; p < PARTS; ++p) factors[p] = load(packed + i * COLUMNS + p * WIDTH);
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PARTS; ++p) sums[r][p] += x[i * ROWS + r] * factors[p];
  }
  float found[ROWS][COLUMNS];
  std::memcpy(found, sums, sizeof(found));
  if (rows == ROWS && columns == COLUMNS && !is_first) {
    for (int64_t r = 0; r < ROWS; ++r)
      for (int64_t c = 0; c < COLUMNS; ++c) out[r * stride + c] += found[r][c];
    return;
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[r * stride + c] = is_first ? found[r][c] : out[r * stride + c] + found[r][c];
}

// Up to COLUMNS columns of a factor from column c on, as [depth, COLUMNS].
void pack_at(const float* factor, bool is_transposed, int64_t c, int64_t depth, int64_t columns, float* to) {
  const int64_t width = std::min(COLUMNS, columns - c);
  if (is_transposed)
    pack_transposed(factor + c * depth, depth, width, depth, to);
  else
    pack(factor + c, columns, width, depth, to);
}

// Rows `begin` to `end` of x with the packed columns from c on.
void tiles(const float* x, const float* packed, const float* bias, float* out, int64_t begin, int64_t end,
           int64_t depth, int64_t columns, int64_t c) {
  const int64_t width = std::min(COLUMNS, columns - c);
  const float* added = bias == nullptr ? nullptr : bias + c;
  for (int64_t row = begin; row < end; row += ROWS) {
    const float* from = x + row * depth;
    float* to = out + row * columns + c;
    switch (end - row) {
      case 1: tile<1>(from, packed, added, to, depth, columns, width); break;
      case 2: tile<2>(from, packed, added, to, depth, columns, width); break;
      case 3: tile<3>(from, packed, added, to, depth, columns, width); break;
      case 4: tile<4>(from, packed, added, to, depth, columns, width); break;
      case 5: tile<5>(from, packed, added, to, depth, columns, width); break;
      default: tile<ROWS>(from, packed, added, to, depth, columns, width);
    }
  }
}

}  // namespace

// out [rows, columns] = x [rows, depth] factor [depth, columns] + bias [columns], which may be null. All are contiguous;
// the factor lies as [columns, depth] where `is_transposed`.
extern "C" void whet_product(const float* x, const float* factor, int is_transposed, const float* bias, float* out,
                             int64_t rows, int64_t depth, int64_t columns) {
  const int64_t panels = (columns + COLUMNS - 1) / COLUMNS, chunks = (rows + CHUNK - 1) / CHUNK;
  // Threads share out columns where rows are few: each column is packed once. Else rows: each is read for many columns.
  const bool by_rows = rows >= MANY * omp_get_max_threads();
  const int64_t group = by_rows ? std::clamp(HELD / (depth * COLUMNS), int64_t{1}, panels) : 1;
#pragma omp parallel if (rows * depth * columns > FEW)
  {
    std::vector<float> packed(depth * COLUMNS * group);
    if (by_rows) {
      const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads(), tall = (rows + ROWS - 1) / ROWS;
      const int64_t from = tall * thread / threads * ROWS, to = std::min(rows, tall * (thread + 1) / threads * ROWS);
      for (int64_t first = 0; first < panels; first += group) {
        const int64_t last = std::min(panels, first + group);
        for (int64_t p = first; p < last; ++p)
          pack_at(factor, is_transposed, p * COLUMNS, depth, columns, packed.data() + (p - first) * depth * COLUMNS);
        for (int64_t begin = from; begin < to; begin += CHUNK)
          for (int64_t p = first; p < last; ++p)
            tiles(x, packed.data() + (p - first) * depth * COLUMNS, bias, out, begin, std::min(to, begin + CHUNK), depth,
                  columns, p * COLUMNS);
      }
    } else {
      int64_t held = -1;  // the panel that is packed
#pragma omp for schedule(static) nowait
      for (int64_t unit = 0; unit < panels * chunks; ++unit) {
        const int64_t panel = unit / chunks, begin = unit % chunks * CHUNK;
        if (panel != held) pack_at(factor, is_transposed, panel * COLUMNS, depth, columns, packed.data());
        held = panel;
        tiles(x, packed.data(), bias, out, begin, std::min(rows, begin + CHUNK), depth, columns, panel * COLUMNS);
      }
    }
  }
}

// out [rows, columns] = x^T factor, where x [depth, rows] and factor [depth, columns]. All are contiguous.
extern "C" void whet_product_of_columns(const float* x, const float* factor, float* out, int64_t rows, int64_t depth,
                                        int64_t columns) {
  const auto parts = [](int64_t of, int64_t size) { return (of + size - 1) / size; };
  const int64_t threads = omp_get_max_threads(), wanted = threads * parts(rows, TALL * threads);
  const int64_t block = block_of(depth), size = parts(parts(rows, wanted), ROWS) * ROWS, chunks = parts(rows, size);
#pragma omp parallel if (rows * depth * columns > FEW)
  {
    std::vector<float> own(size * block), packed(block * COLUMNS);
#pragma omp for schedule(static) nowait
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t begin = chunk * size, end = std::min(rows, begin + size);
      for (int64_t first = 0; first < depth; first += block) {
        const int64_t count = std::min(block, depth - first);
        for (int64_t row = begin; row < end; row += ROWS) {
          const float* from = x + first * rows + row;
          float* to = own.data() + (row - begin) * block;
          if (row + ROWS <= end)
            for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * ROWS, from + i * rows, ROWS * sizeof(float));
          else
            for (int64_t i = 0; i < count; ++i)
              for (int64_t r = 0; r < ROWS; ++r) to[i * ROWS + r] = row + r < end ? from[i * rows + r] : 0.0f;
        }
        for (int64_t c = 0; c < columns; c += COLUMNS) {
          const int64_t width = std::min(COLUMNS, columns - c);
          pack(factor + first * columns + c, columns, width, count, packed.data());
          // The next columns of the factor come while these are multiplied.
          const int64_t lines = c + 2 * COLUMNS <= columns ? count : 0, share = (lines * ROWS + end - begin - 1) / (end - begin);
          for (int64_t row = begin; row < end; row += ROWS) {
            const int64_t line = (row - begin) / ROWS * share;
            for (int64_t i = line; i < std::min(lines, line + share); ++i)
              __builtin_prefetch(factor + (first + i) * columns + c + COLUMNS);
            add_tile(own.data() + (row - begin) * block, packed.data(), out + row * columns + c, count, columns,
                     std::min(ROWS, end - row), width, first == 0);
          }
        }
      }
    }
  }
}

"""Metal source that several kernels share: 8x8 tiles in registers, and rows of packed weights times a few rows.

A lane of a simdgroup holds two neighbouring columns of one row of an 8x8 matrix (the layout MLX's own kernels rely on).
The weights are the left operand, straight from memory to registers; which k a column stands for is free as long as both
operands agree, so each lane takes 32 neighbouring k of its weight row and 16 of an activation row, in wide loads.
"""

UNROLL = """
// Arrays a lane holds are registers only while every index is known to the compiler.
#define UNROLL _Pragma("clang loop unroll(full)")
"""

LANES = (
    UNROLL
    + """
METAL_FUNC uint tile_row(uint lane) { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
METAL_FUNC uint tile_column(uint lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
METAL_FUNC thread vec<float, 2>& elements(thread simdgroup_matrix<float, 8, 8>& tile) {
  return reinterpret_cast<thread vec<float, 2>&>(tile.thread_elements());
}

// What a simdgroup sums up: 8 NT weight rows by 8 MT activation rows.
template <int NT, int MT>
struct Tiles {
  simdgroup_matrix<float, 8, 8> tile[NT][MT];
  void clear() {
    UNROLL for (int i = 0; i < NT; ++i)
      UNROLL for (int j = 0; j < MT; ++j) elements(tile[i][j]) = float2(0.0f);
  }
  // As floats [8 MT, 8 NT] in threadgroup memory.
  void put(threadgroup float* to, uint lane) {
    UNROLL for (int i = 0; i < NT; ++i)
      UNROLL for (int j = 0; j < MT; ++j)
        UNROLL for (uint e = 0; e < 2; ++e)
          to[(8 * j + tile_column(lane) + e) * 8 * NT + 8 * i + tile_row(lane)] = elements(tile[i][j])[e];
  }
};
"""
)

PACKED = """
// A lane's share of one row of packed weights: 32 neighbouring k, which lie in one group.
template <int BITS>
struct Chunk {
  uint4 words[BITS / 4];
  float scale, bias;
};

template <int BITS, int GROUP, typename S>
METAL_FUNC void load_chunk(thread Chunk<BITS>& chunk, const device uint* w, const device S* scales,
                           const device S* biases, uint n, uint N, uint k, uint K) {
  if (n < N && k < K) {
    const device uint4* from = (const device uint4*)(w + (ulong(n) * K + k) / (32 / BITS));
    UNROLL for (int i = 0; i < BITS / 4; ++i) chunk.words[i] = from[i];
    ulong group = ulong(n) * (K / GROUP) + k / GROUP;
    chunk.scale = float(scales[group]);
    chunk.bias = float(biases[group]);
  } else {
    UNROLL for (int i = 0; i < BITS / 4; ++i) chunk.words[i] = uint4(0);
    chunk.scale = chunk.bias = 0.0f;
  }
}

// acc.tile[i][j] += W[n0 + 8i .. +8, k of these steps] * x[8j .. +8, the same k]^T. A step is 128 k; this simdgroup
// takes every `stride`-th from `first` on. The next step's words are on their way while this one multiplies.
template <typename T, int BITS, int GROUP, int NT, int MT, typename S>
METAL_FUNC void multiply_packed(thread Tiles<NT, MT>& acc, const device uint* w, const device S* scales,
                                const device S* biases, const device T* x, uint n0, uint N, uint M, uint K, uint first,
                                uint stride, uint lane) {
  constexpr uint MASK = (1u << BITS) - 1;
  const uint row = tile_row(lane), column = tile_column(lane);
  const device vec<T, 4>* x4 = (const device vec<T, 4>*)x;
  Chunk<BITS> now[NT], next[NT];
  UNROLL for (int i = 0; i < NT; ++i)
    load_chunk<BITS, GROUP>(now[i], w, scales, biases, n0 + 8 * i + row, N, first * 128 + 16 * column, K);
  for (uint step = first; step * 128 < K; step += stride) {
    UNROLL for (int i = 0; i < NT; ++i)
      load_chunk<BITS, GROUP>(next[i], w, scales, biases, n0 + 8 * i + row, N, (step + stride) * 128 + 16 * column, K);
    const uint k = step * 128 + 16 * row;
    UNROLL for (int t = 0; t < 4; ++t) {
      vec<T, 4> values[MT][2];
      UNROLL for (int j = 0; j < MT; ++j)
        UNROLL for (int e = 0; e < 2; ++e) {
          const uint m = 8 * j + column + e;
          values[j][e] = m < M && k < K ? x4[(m * K + k) / 4 + t] : vec<T, 4>(T(0));
        }
      UNROLL for (int v = 0; v < 4; ++v) {
        simdgroup_matrix<float, 8, 8> a, b[MT];
        UNROLL for (int j = 0; j < MT; ++j) elements(b[j]) = float2(float(values[j][0][v]), float(values[j][1][v]));
        UNROLL for (int i = 0; i < NT; ++i) {
          // Value v of a word is masked where it lies, never shifted down: the scale makes up for it.
          const float scale = now[i].scale * (1.0f / float(1u << (BITS * v)));
          UNROLL for (int e = 0; e < 2; ++e) {
            const int word = (e * 4 + t) * BITS / 8;
            const uint packed = now[i].words[word / 4][word % 4] >> (t * 4 * BITS & 31);
            elements(a)[e] = fma(float(packed & (MASK << (BITS * v))), scale, now[i].bias);
          }
          UNROLL for (int j = 0; j < MT; ++j) simdgroup_multiply_accumulate(acc.tile[i][j], a, b[j], acc.tile[i][j]);
        }
      }
    }
    UNROLL for (int i = 0; i < NT; ++i) now[i] = next[i];
  }
}
"""

DENSE = """
// Rows of numbers, 4 neighbouring at a time. What multiplies a weight may be anything that has at(m, k).
template <typename T>
struct Rows {
  const device T* x;
  uint width;
  float4 at(uint m, uint k) {
    return float4(((const device vec<T, 4>*)x)[(m * width + k) / 4]);
  }
};

// acc.tile[i][j] += W[n0 + 8i .. +8, k of these steps] * x[8j .. +8, the same k]^T. A step is 32 k; this simdgroup
// takes every `stride`-th from `first` on.
template <int NT, int MT, typename W, typename X>
METAL_FUNC void multiply_dense(thread Tiles<NT, MT>& acc, Rows<W> w, X x, uint n0, uint N, uint M, uint first,
                               uint stride, uint lane) {
  const uint row = tile_row(lane), column = tile_column(lane), K = w.width;
  for (uint step = first; step * 32 < K; step += stride) {
    float4 weights[NT][2], values[MT][2];
    UNROLL for (int i = 0; i < NT; ++i)
      UNROLL for (uint e = 0; e < 2; ++e) {
        const uint n = n0 + 8 * i + row;
        weights[i][e] = n < N ? w.at(n, step * 32 + 4 * (column + e)) : float4(0.0f);
      }
    UNROLL for (int j = 0; j < MT; ++j)
      UNROLL for (uint e = 0; e < 2; ++e) {
        const uint m = 8 * j + column + e;
        values[j][e] = m < M ? x.at(m, step * 32 + 4 * row) : float4(0.0f);
      }
    UNROLL for (int v = 0; v < 4; ++v) {
      simdgroup_matrix<float, 8, 8> a, b[MT];
      UNROLL for (int j = 0; j < MT; ++j) elements(b[j]) = float2(values[j][0][v], values[j][1][v]);
      UNROLL for (int i = 0; i < NT; ++i) {
        elements(a) = float2(weights[i][0][v], weights[i][1][v]);
        UNROLL for (int j = 0; j < MT; ++j) simdgroup_multiply_accumulate(acc.tile[i][j], a, b[j], acc.tile[i][j]);
      }
    }
  }
}
"""

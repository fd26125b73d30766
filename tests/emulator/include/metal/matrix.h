// simdgroup_matrix: 8 x 8, two neighbouring elements of a row in each lane. The lane's bits (b4 b3 b2 b1 b0) are row
// 4 b4 + 2 b2 + b1 and columns 4 b3 + 2 b0 and the next, as thread_elements() shows on Apple's GPUs up to the M4 (MLX's
// steel kernels rely on it; Apple does not document it). Products are added in float32 in the order of k.
#pragma once
namespace metal {
template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "8 x 8 is the only size");
  static_assert(is_floating_point<T>::value, "of float, half or bfloat");
  vec<T, 2> own;
  simdgroup_matrix() = default;
  EMU_INLINE explicit simdgroup_matrix(T diagonal);
  EMU_INLINE vec<T, 2>& thread_elements() { return own; }
  EMU_INLINE const vec<T, 2>& thread_elements() const { return own; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
}  // namespace metal

namespace emu {
EMU_INLINE uint row_of(uint lane) { return (lane >> 4 & 1) * 4 + (lane >> 2 & 1) * 2 + (lane >> 1 & 1); }
EMU_INLINE uint column_of(uint lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
struct pieces {
  float a[2], b[2], c[2];
};
EMU_OUTSIDE inline metal::vec<float, 2> multiply(EmuMeeting* m) {
  float* d = (float*)m->result;
  if (!m->done) {
    float a[8][8] = {}, b[8][8] = {};
    for (uint lane = 0; lane < 32; ++lane) {
      if (!(m->present >> lane & 1)) continue;
      pieces p;
      __builtin_memcpy(&p, m->brought[lane], sizeof p);
      for (int k = 0; k < 2; ++k) {
        uint row = row_of(lane), column = column_of(lane) + k;
        a[row][column] = p.a[k], b[row][column] = p.b[k], d[row * 8 + column] = p.c[k];
      }
    }
    for (int k = 0; k < 8; ++k)
      for (int row = 0; row < 8; ++row)
        for (int column = 0; column < 8; ++column)
          d[row * 8 + column] = __builtin_fmaf(a[row][k], b[k][column], d[row * 8 + column]);
    m->done = true;
    emu_matrix_multiplied();
  }
  metal::vec<float, 2> own;
  own[0] = d[row_of(me()) * 8 + column_of(me())], own[1] = d[row_of(me()) * 8 + column_of(me()) + 1];
  return own;
}
EMU_INLINE EmuMeeting* meet_whole(const EmuSite& here, const pieces& p) {
  EmuMeeting* m = meet(here, p);
  if (m->present != ~0u) emu_simd_fault(EMU_MATRIX_PARTIAL, 0);
  return m;
}
}  // namespace emu

#ifdef EMU_ADDRESS_SPACES  // there, the same type of another address space is another type
#define EMU_SAME_TYPE(VALUE, T, MESSAGE)
#else
#define EMU_SAME_TYPE(VALUE, T, MESSAGE) \
  static_assert(metal::is_same<metal::remove_cv_t<metal::remove_reference_t<decltype(VALUE)>>, T>::value, MESSAGE)
#endif

namespace metal {
template <class T, int R, int C> EMU_INLINE simdgroup_matrix<T, R, C>::simdgroup_matrix(T diagonal) {
  uint row = emu::row_of(emu::me()), column = emu::column_of(emu::me());
  own[0] = row == column ? diagonal : T(0), own[1] = row == column + 1 ? diagonal : T(0);
}
template <class T, int R, int C = R> EMU_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.own[0] = value, m.own[1] = value;
  return m;
}
template <class T, class P>
EMU_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, P from, ulong row_length = 8, vec<ulong, 2> origin = 0,
                               bool transposed = false, EMU_HERE) {
  EMU_SAME_TYPE(*from, T, "a matrix is loaded from its own type");
  emu::meet_whole(here, {});
  uint row = emu::row_of(emu::me()), column = emu::column_of(emu::me());
  for (uint k = 0; k < 2; ++k) {
    ulong r = transposed ? column + k : row, c = transposed ? row : column + k;
    m.own[k] = from[(origin[1] + r) * row_length + origin[0] + c];
  }
}
template <class T, class P>
EMU_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> m, P to, ulong row_length = 8, vec<ulong, 2> origin = 0,
                                bool transposed = false, EMU_HERE) {
  EMU_SAME_TYPE(*to, T, "a matrix is stored to its own type");
  emu::meet_whole(here, {});
  uint row = emu::row_of(emu::me()), column = emu::column_of(emu::me());
  for (uint k = 0; k < 2; ++k) {
    ulong r = transposed ? column + k : row, c = transposed ? row : column + k;
    to[(origin[1] + r) * row_length + origin[0] + c] = m.own[k];
  }
}
template <class D, class A, class B, class C>
EMU_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, EMU_HERE) {
  emu::pieces p = {{(float)a.own[0], (float)a.own[1]}, {(float)b.own[0], (float)b.own[1]}, {(float)c.own[0], (float)c.own[1]}};
  vec<float, 2> own = emu::multiply(emu::meet_whole(here, p));
  d.own[0] = (D)own[0], d.own[1] = (D)own[1];
}
template <class D, class A, class B>
EMU_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                   EMU_HERE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), here);
}
}  // namespace metal

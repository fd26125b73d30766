// What MLX puts before every kernel (mlx/backend/metal/kernels/utils.h), as far as kernels use it.
#pragma once
typedef half float16_t;
typedef bfloat bfloat16_t;
namespace emu {
// The offset of the element with this row-contiguous number in an array of any strides.
template <class I, class S, class D> EMU_INLINE I element_offset(I number, S shape, D strides, int ndim) {
  I offset = 0;
  for (int axis = ndim - 1; axis >= 0; --axis) {
    offset += (I)(number % shape[axis]) * (I)strides[axis];
    number /= shape[axis];
  }
  return offset;
}
}  // namespace emu
template <class S, class D> EMU_INLINE long elem_to_loc(uint elem, S shape, D strides, int ndim) {
  return emu::element_offset<long>((long)elem, shape, strides, ndim);
}
EMU_INLINE size_t ceildiv(size_t n, size_t m) { return (n + m - 1) / m; }

// Barriers and the operations among the lanes of a simdgroup.
#pragma once
namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = EMU_DEVICE, mem_threadgroup = EMU_THREADGROUP, mem_texture = 4 };
EMU_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
EMU_INLINE void threadgroup_barrier(mem_flags memory, EMU_HERE) { emu_threadgroup_barrier(here, (uint)memory); }
EMU_INLINE void simdgroup_barrier(mem_flags memory, EMU_HERE) { emu_simdgroup_barrier(here, (uint)memory); }
}  // namespace metal

namespace emu {
template <class T> EMU_OUTSIDE T brought_by(const EmuMeeting* m, uint lane) {
  T value;
  if (lane > 31 || !(m->present >> lane & 1)) {  // what Metal gives is undefined
    emu_simd_fault(EMU_SHUFFLE_INACTIVE, lane);
    __builtin_memset(&value, 0xff, sizeof value);
  } else {
    __builtin_memcpy(&value, m->brought[lane], sizeof value);
  }
  return value;
}
template <class T> EMU_INLINE EmuMeeting* meet(const EmuSite& here, T value) {
  static_assert(sizeof(T) <= 32, "at most 32 bytes a lane");
  return emu_meet(here, &value, sizeof value);
}
// The lanes' values in pairs, 16 apart last, as a butterfly of shuffles would add them; absent lanes bring nothing.
// Apple documents no order.
template <class O, class T> EMU_OUTSIDE T reduce(EmuMeeting* m) {
  T result;
  if (!m->done) {
    T values[32];
    bool present[32];
    for (int i = 0; i < 32; ++i) {
      present[i] = m->present >> i & 1;
      if (present[i]) __builtin_memcpy(&values[i], m->brought[i], sizeof(T));
    }
    for (int step = 1; step < 32; step *= 2)
      for (int i = 0; i + step < 32; i += 2 * step) {
        if (!present[i + step]) continue;
        values[i] = present[i] ? O::of(values[i], values[i + step]) : values[i + step];
        present[i] = true;
      }
    __builtin_memcpy(m->result, &values[0], sizeof(T));
    m->done = true;
  }
  __builtin_memcpy(&result, m->result, sizeof(T));
  return result;
}
template <class O, class T> EMU_OUTSIDE T reduce_before(const EmuMeeting* m, uint end, T start) {
  for (uint i = 0; i < end; ++i) {
    if (!(m->present >> i & 1)) continue;
    T value;
    __builtin_memcpy(&value, m->brought[i], sizeof value);
    start = O::of(start, value);
  }
  return start;
}
EMU_OUTSIDE inline uint ballot(const EmuMeeting* m) {
  uint votes = 0;
  for (int i = 0; i < 32; ++i) votes |= (m->present >> i & 1 && m->brought[i][0]) ? 1u << i : 0;
  return votes;
}
EMU_INLINE uint me() { return emu_lane->index_in_simdgroup; }
}  // namespace emu

namespace metal {
#define EMU_REDUCTION(NAME, EXPRESSION)                                                   \
  struct NAME##_operation {                                                               \
    template <class T> static EMU_INLINE T of(T a, T b) { return (T)(EXPRESSION); }       \
  };                                                                                      \
  template <class T> EMU_INLINE T simd_##NAME(T x, EMU_HERE) {                            \
    return emu::reduce<NAME##_operation, T>(emu::meet(here, x));                          \
  }                                                                                       \
  template <class T> EMU_INLINE T quad_##NAME(T x, EMU_HERE) {                            \
    EmuMeeting* m = emu::meet(here, x);                                                   \
    uint q = emu::me() & ~3u;                                                             \
    using O = NAME##_operation;                                                           \
    T low = O::of(emu::brought_by<T>(m, q), emu::brought_by<T>(m, q + 1));                \
    return O::of(low, O::of(emu::brought_by<T>(m, q + 2), emu::brought_by<T>(m, q + 3))); \
  }
EMU_REDUCTION(sum, a + b)
EMU_REDUCTION(product, a * b)
EMU_REDUCTION(max, metal::max(a, b))
EMU_REDUCTION(min, metal::min(a, b))
EMU_REDUCTION(and, a & b)
EMU_REDUCTION(or, a | b)
EMU_REDUCTION(xor, a ^ b)

template <class T> EMU_INLINE T simd_shuffle(T x, ushort lane, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), lane);
}
template <class T> EMU_INLINE T simd_broadcast(T x, ushort lane, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), lane);
}
template <class T> EMU_INLINE T simd_broadcast_first(T x, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  return emu::brought_by<T>(m, __builtin_ctz(m->present));
}
template <class T> EMU_INLINE T simd_shuffle_xor(T x, ushort mask, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), emu::me() ^ mask);
}
// Metal leaves undefined what a lane gets whose source lies outside; here it keeps its own value.
template <class T> EMU_INLINE T simd_shuffle_down(T x, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  uint from = emu::me() + by;
  return from > 31 ? x : emu::brought_by<T>(m, from);
}
template <class T> EMU_INLINE T simd_shuffle_up(T x, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  return emu::me() < by ? x : emu::brought_by<T>(m, emu::me() - by);
}
template <class T> EMU_INLINE T simd_shuffle_rotate_down(T x, ushort by, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), (emu::me() + by) % 32);
}
template <class T> EMU_INLINE T simd_shuffle_rotate_up(T x, ushort by, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), (emu::me() + 32 - by % 32) % 32);
}
template <class T> EMU_INLINE T simd_shuffle_and_fill_down(T x, T fill, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  uint from = emu::me() + by;
  T other = emu::brought_by<T>(emu::meet(here, fill), from % 32);
  return from > 31 ? other : emu::brought_by<T>(m, from);
}
template <class T> EMU_INLINE T simd_shuffle_and_fill_up(T x, T fill, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  T other = emu::brought_by<T>(emu::meet(here, fill), (emu::me() + 32 - by) % 32);
  return emu::me() < by ? other : emu::brought_by<T>(m, emu::me() - by);
}
template <class T> EMU_INLINE T simd_prefix_inclusive_sum(T x, EMU_HERE) {
  return emu::reduce_before<sum_operation, T>(emu::meet(here, x), emu::me() + 1, T(0));
}
template <class T> EMU_INLINE T simd_prefix_exclusive_sum(T x, EMU_HERE) {
  return emu::reduce_before<sum_operation, T>(emu::meet(here, x), emu::me(), T(0));
}
template <class T> EMU_INLINE T simd_prefix_inclusive_product(T x, EMU_HERE) {
  return emu::reduce_before<product_operation, T>(emu::meet(here, x), emu::me() + 1, T(1));
}
template <class T> EMU_INLINE T simd_prefix_exclusive_product(T x, EMU_HERE) {
  return emu::reduce_before<product_operation, T>(emu::meet(here, x), emu::me(), T(1));
}
EMU_INLINE bool simd_any(bool x, EMU_HERE) { return emu::ballot(emu::meet(here, x)) != 0; }
EMU_INLINE bool simd_all(bool x, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  return emu::ballot(m) == m->present;
}
EMU_INLINE bool simd_is_first(EMU_HERE) { return (uint)__builtin_ctz(emu::meet(here, true)->present) == emu::me(); }
struct simd_vote {
  ulong votes;
  explicit simd_vote(ulong v) : votes(v) {}
  explicit operator ulong() const { return votes; }
  bool any() const { return votes != 0; }
};
EMU_INLINE simd_vote simd_ballot(bool x, EMU_HERE) { return simd_vote(emu::ballot(emu::meet(here, x))); }
EMU_INLINE simd_vote simd_active_threads_mask(EMU_HERE) { return simd_vote(emu::meet(here, true)->present); }

// Quad operations: here the whole simdgroup comes, which is stricter than Metal.
template <class T> EMU_INLINE T quad_shuffle_xor(T x, ushort mask, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), emu::me() ^ (mask & 3));
}
template <class T> EMU_INLINE T quad_broadcast(T x, ushort lane, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), (emu::me() & ~3u) + (lane & 3));
}
template <class T> EMU_INLINE T quad_shuffle(T x, ushort lane, EMU_HERE) {
  return emu::brought_by<T>(emu::meet(here, x), (emu::me() & ~3u) + (lane & 3));
}
template <class T> EMU_INLINE T quad_shuffle_down(T x, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  return (emu::me() & 3) + by > 3 ? x : emu::brought_by<T>(m, emu::me() + by);
}
template <class T> EMU_INLINE T quad_shuffle_up(T x, ushort by, EMU_HERE) {
  EmuMeeting* m = emu::meet(here, x);
  return (emu::me() & 3) < by ? x : emu::brought_by<T>(m, emu::me() - by);
}
}  // namespace metal

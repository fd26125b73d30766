// Atomic operations. A lane is never interrupted, so a plain read, change and write is atomic.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
  T value;
};
using atomic_uint = atomic<uint>;
using atomic_int = atomic<int>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;
#define EMU_CALLER __builtin_return_address(0)
#define EMU_VALUE_OF(P) remove_cv_t<remove_reference_t<decltype((*(P)).value)>>
#define EMU_ATOMIC(NAME, EXPRESSION)                                                        \
  template <class P, class U> EMU_OUTSIDE auto atomic_##NAME##_explicit(P at, U operand, memory_order) { \
    using T = EMU_VALUE_OF(at);                                                             \
    emu_atomic((const void*)at, sizeof(T), true, EMU_CALLER);                               \
    T x = (T)operand, old = at->value;                                                      \
    at->value = (T)(EXPRESSION);                                                            \
    return old;                                                                             \
  }
EMU_ATOMIC(fetch_add, old + x)
EMU_ATOMIC(fetch_sub, old - x)
EMU_ATOMIC(fetch_max, old < x ? x : old)
EMU_ATOMIC(fetch_min, x < old ? x : old)
EMU_ATOMIC(fetch_and, old & x)
EMU_ATOMIC(fetch_or, old | x)
EMU_ATOMIC(fetch_xor, old ^ x)
EMU_ATOMIC(exchange, x)
template <class P, class U> EMU_OUTSIDE void atomic_store_explicit(P at, U x, memory_order) {
  using T = EMU_VALUE_OF(at);
  emu_atomic_store((const void*)at, sizeof(T), EMU_CALLER);
  at->value = (T)x;
}
template <class P> EMU_OUTSIDE auto atomic_load_explicit(P at, memory_order) {
  using T = EMU_VALUE_OF(at);
  emu_atomic((const void*)at, sizeof(T), false, EMU_CALLER);
  T x = at->value;
  return x;
}
template <class P, class E, class U>
EMU_OUTSIDE bool atomic_compare_exchange_weak_explicit(P at, E expected, U x, memory_order, memory_order) {
  using T = EMU_VALUE_OF(at);
  emu_atomic((const void*)at, sizeof(T), true, EMU_CALLER);
  if (at->value == *expected) {
    at->value = (T)x;
    return true;
  }
  *expected = at->value;
  return false;
}
}  // namespace metal

// Functions of scalars and of vectors, component by component. Computed in float32 and rounded to the type: Apple's
// fast-math results differ by a few ulps.
#pragma once
namespace emu {
template <class F, class T> EMU_INLINE T each(T x) {
  static_assert(metal::is_floating_point<element<T>>::value, "a function of floating-point values");
  if constexpr (shape<T>::size) {
    for (int i = 0; i < shape<T>::size; ++i) x[i] = (element<T>)F::of((float)x[i]);
    return x;
  } else {
    return (T)F::of((float)x);
  }
}
template <class F, class T> EMU_INLINE T each(T x, T y) {
  static_assert(metal::is_floating_point<element<T>>::value, "a function of floating-point values");
  if constexpr (shape<T>::size) {
    for (int i = 0; i < shape<T>::size; ++i) x[i] = (element<T>)F::of((float)x[i], (float)y[i]);
    return x;
  } else {
    return (T)F::of((float)x, (float)y);
  }
}
}  // namespace emu

namespace metal {
#define EMU_FUNCTION(NAME, EXPRESSION)                                             \
  struct NAME##_function {                                                         \
    static EMU_INLINE float of(float x) { return EXPRESSION; }                     \
  };                                                                               \
  template <class T> EMU_INLINE T NAME(T x) { return emu::each<NAME##_function>(x); } \
  namespace fast { using metal::NAME; }                                            \
  namespace precise { using metal::NAME; }
#define EMU_FUNCTION2(NAME, EXPRESSION)                                                   \
  struct NAME##_function {                                                                \
    static EMU_INLINE float of(float x, float y) { return EXPRESSION; }                   \
  };                                                                                      \
  template <class T> EMU_INLINE T NAME(T x, T y) { return emu::each<NAME##_function>(x, y); } \
  namespace fast { using metal::NAME; }                                                   \
  namespace precise { using metal::NAME; }
EMU_FUNCTION(exp, __builtin_expf(x))
EMU_FUNCTION(exp2, __builtin_exp2f(x))
EMU_FUNCTION(exp10, __builtin_powf(10.0f, x))
EMU_FUNCTION(log, __builtin_logf(x))
EMU_FUNCTION(log2, __builtin_log2f(x))
EMU_FUNCTION(log10, __builtin_log10f(x))
EMU_FUNCTION(log1p, __builtin_log1pf(x))
EMU_FUNCTION(expm1, __builtin_expm1f(x))
EMU_FUNCTION(erf, __builtin_erff(x))
EMU_FUNCTION(sqrt, __builtin_sqrtf(x))
EMU_FUNCTION(rsqrt, 1.0f / __builtin_sqrtf(x))
EMU_FUNCTION(sin, __builtin_sinf(x))
EMU_FUNCTION(cos, __builtin_cosf(x))
EMU_FUNCTION(tan, __builtin_tanf(x))
EMU_FUNCTION(sinh, __builtin_sinhf(x))
EMU_FUNCTION(cosh, __builtin_coshf(x))
EMU_FUNCTION(tanh, __builtin_tanhf(x))
EMU_FUNCTION(asin, __builtin_asinf(x))
EMU_FUNCTION(acos, __builtin_acosf(x))
EMU_FUNCTION(atan, __builtin_atanf(x))
EMU_FUNCTION(floor, __builtin_floorf(x))
EMU_FUNCTION(ceil, __builtin_ceilf(x))
EMU_FUNCTION(round, __builtin_roundf(x))
EMU_FUNCTION(rint, __builtin_rintf(x))
EMU_FUNCTION(trunc, __builtin_truncf(x))
EMU_FUNCTION(fabs, __builtin_fabsf(x))
EMU_FUNCTION(fract, x - __builtin_floorf(x))
EMU_FUNCTION(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
EMU_FUNCTION(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
EMU_FUNCTION2(pow, __builtin_powf(x, y))
EMU_FUNCTION2(powr, __builtin_powf(x, y))
EMU_FUNCTION2(fmod, __builtin_fmodf(x, y))
EMU_FUNCTION2(atan2, __builtin_atan2f(x, y))
EMU_FUNCTION2(fmin, __builtin_fminf(x, y))
EMU_FUNCTION2(fmax, __builtin_fmaxf(x, y))
EMU_FUNCTION2(copysign, __builtin_copysignf(x, y))
EMU_FUNCTION2(divide, x / y)
EMU_FUNCTION2(step, y < x ? 0.0f : 1.0f)

// float: one rounding. half and bfloat: through float32, so two.
template <class T> EMU_INLINE T fma(T a, T b, T c) {
  if constexpr (emu::shape<T>::size) {
    for (int i = 0; i < emu::shape<T>::size; ++i)
      a[i] = (emu::element<T>)__builtin_fmaf((float)a[i], (float)b[i], (float)c[i]);
    return a;
  } else {
    return (T)__builtin_fmaf((float)a, (float)b, (float)c);
  }
}
template <class T> EMU_INLINE T ldexp(T x, int e) { return (T)__builtin_ldexpf((float)x, e); }

namespace choose {
template <class T> EMU_INLINE T smaller(T a, T b) {
  if constexpr (is_floating_point<T>::value) {
    if (a != a) return b;
    if (b != b) return a;
  }
  return b < a ? b : a;
}
template <class T> EMU_INLINE T greater(T a, T b) {
  if constexpr (is_floating_point<T>::value) {
    if (a != a) return b;
    if (b != b) return a;
  }
  return a < b ? b : a;
}
}  // namespace choose
template <class T> EMU_INLINE T min(T a, T b) {
  if constexpr (emu::shape<T>::size) {
    for (int i = 0; i < emu::shape<T>::size; ++i) a[i] = choose::smaller((emu::element<T>)a[i], (emu::element<T>)b[i]);
    return a;
  } else {
    return choose::smaller(a, b);
  }
}
template <class T> EMU_INLINE T max(T a, T b) {
  if constexpr (emu::shape<T>::size) {
    for (int i = 0; i < emu::shape<T>::size; ++i) a[i] = choose::greater((emu::element<T>)a[i], (emu::element<T>)b[i]);
    return a;
  } else {
    return choose::greater(a, b);
  }
}
template <class T> EMU_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }
template <class T> EMU_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }
template <class T> EMU_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T, int N> EMU_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}
template <class T> EMU_INLINE T abs(T a) {
  if constexpr (emu::shape<T>::size) {
    for (int i = 0; i < emu::shape<T>::size; ++i) a[i] = abs((emu::element<T>)a[i]);
    return a;
  } else if constexpr (is_floating_point<T>::value) {
    return (T)__builtin_fabsf((float)a);
  } else {
    return a < (T)0 ? (T)-a : a;
  }
}
template <class T, int N> EMU_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T, int N> EMU_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T> EMU_INLINE T mix(T a, T b, T t) { return a + (b - a) * t; }
template <class T, class C> EMU_INLINE T select(T a, T b, C choice) {
  if constexpr (emu::shape<C>::size) {
    for (int i = 0; i < emu::shape<T>::size; ++i) a[i] = choice[i] ? b[i] : a[i];
    return a;
  } else {
    return choice ? b : a;
  }
}
template <class C> EMU_INLINE bool any(C c) {
  bool found = false;
  for (int i = 0; i < emu::shape<C>::size; ++i) found |= c[i] != 0;
  return found;
}
template <class C> EMU_INLINE bool all(C c) {
  bool every = true;
  for (int i = 0; i < emu::shape<C>::size; ++i) every &= c[i] != 0;
  return every;
}
template <class T> EMU_INLINE bool isnan(T x) { return __builtin_isnan((float)x); }
template <class T> EMU_INLINE bool isinf(T x) { return __builtin_isinf((float)x); }
template <class T> EMU_INLINE bool isfinite(T x) { return __builtin_isfinite((float)x); }

template <class T> EMU_INLINE T popcount(T x) { return (T)__builtin_popcountl((ulong)(make_unsigned_t<T>)x); }
EMU_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
EMU_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
EMU_INLINE uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
EMU_INLINE int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
EMU_INLINE uint mad24(uint a, uint b, uint c) { return a * b + c; }
EMU_INLINE uint rotate(uint x, uint by) { return by % 32 ? x << by % 32 | x >> (32 - by % 32) : x; }
EMU_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMU_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : bits == 32 ? x : x >> offset & ((1u << bits) - 1);
}
EMU_INLINE int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - bits - offset)) >> (32 - bits);
}
EMU_INLINE uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  uint mask = (bits == 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | (insert << offset & mask);
}
}  // namespace metal

// Scalars, vectors, type traits and limits.
#pragma once
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 65504.0f
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (~0u)
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LN2_F 0.69314718055994530942f
#define M_LOG2E_F 1.44269504088896340736f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define __METAL_VERSION__ 310
#define METAL_FUNC inline __attribute__((always_inline))

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <class A, class B> struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B> struct is_convertible : bool_constant<__is_convertible(A, B)> {};
template <class A, class B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_const_t = __remove_const(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using remove_pointer_t = __remove_pointer(T);
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> using decay_t = __decay(T);
template <class T> struct remove_cv { using type = remove_cv_t<T>; };
template <class T> struct remove_reference { using type = remove_reference_t<T>; };
template <class T> struct is_floating_point
    : bool_constant<__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat)> {};
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};
template <class T> struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <class T> struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T> struct is_unsigned : bool_constant<!(T(-1) < T(0))> {};
template <class T> struct is_const : bool_constant<__is_const(T)> {};
template <class T> struct is_pointer : bool_constant<__is_pointer(T)> {};
template <class T> struct is_array : bool_constant<__is_array(T)> {};
template <class T> struct is_void : bool_constant<__is_void(T)> {};
template <class T> struct is_class : bool_constant<__is_class(T)> {};
template <class T> struct is_enum : bool_constant<__is_enum(T)> {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class A, class B> constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <class A, class B> constexpr bool is_base_of_v = is_base_of<A, B>::value;
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> constexpr bool is_integral_v = is_integral<T>::value;
template <class T> constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> constexpr bool is_signed_v = is_signed<T>::value;
template <class...> struct conjunction : true_type {};
template <class A, class... R> struct conjunction<A, R...> : conditional_t<bool(A::value), conjunction<R...>, false_type> {};
template <class...> struct disjunction : false_type {};
template <class A, class... R> struct disjunction<A, R...> : conditional_t<bool(A::value), true_type, disjunction<R...>> {};
template <class A> struct negation : bool_constant<!A::value> {};
template <class T> T&& declval();

template <class T> struct numeric_limits;
#define EMU_INTEGER_LIMITS(T, LOW, HIGH, DIGITS)     \
  template <> struct numeric_limits<T> {             \
    static constexpr int digits = DIGITS;            \
    static constexpr T max() { return (T)(HIGH); }   \
    static constexpr T min() { return (T)(LOW); }    \
    static constexpr T lowest() { return (T)(LOW); } \
  };
EMU_INTEGER_LIMITS(bool, false, true, 1)
EMU_INTEGER_LIMITS(uint8_t, 0, 255, 8)
EMU_INTEGER_LIMITS(uint16_t, 0, 65535, 16)
EMU_INTEGER_LIMITS(uint32_t, 0, ~0u, 32)
EMU_INTEGER_LIMITS(uint64_t, 0, ~0ul, 64)
EMU_INTEGER_LIMITS(int8_t, -128, 127, 7)
EMU_INTEGER_LIMITS(int16_t, -32768, 32767, 15)
EMU_INTEGER_LIMITS(int32_t, -2147483647 - 1, 2147483647, 31)
EMU_INTEGER_LIMITS(int64_t, -9223372036854775807l - 1, 9223372036854775807l, 63)
#define EMU_FLOAT_LIMITS(T, HIGH, SMALL, STEP)                          \
  template <> struct numeric_limits<T> {                                \
    static constexpr T max() { return (T)(HIGH); }                      \
    static constexpr T min() { return (T)(SMALL); }                     \
    static constexpr T lowest() { return (T)(-(HIGH)); }                \
    static constexpr T epsilon() { return (T)(STEP); }                  \
    static constexpr T infinity() { return (T)__builtin_inff(); }       \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }    \
  };
EMU_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
EMU_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-4f)
EMU_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.17549435e-38f, 7.8125e-3f)
}  // namespace metal

#define EMU_VECTORS(T)             \
  using T##2 = metal::vec<T, 2>;   \
  using T##3 = metal::vec<T, 3>;   \
  using T##4 = metal::vec<T, 4>;
EMU_VECTORS(float) EMU_VECTORS(half) EMU_VECTORS(bfloat) EMU_VECTORS(bool)
EMU_VECTORS(char) EMU_VECTORS(short) EMU_VECTORS(int) EMU_VECTORS(long)
EMU_VECTORS(uchar) EMU_VECTORS(ushort) EMU_VECTORS(uint) EMU_VECTORS(ulong)

namespace emu {
template <class T> struct shape {  // scalar
  using element = T;
  static constexpr int size = 0;
};
template <class T, int N> struct shape<metal::vec<T, N>> {
  using element = T;
  static constexpr int size = N;
};
template <class T> using element = typename shape<T>::element;

// float4(...): components one after another, or one scalar for all, or a vector converted.
template <class V, class A> EMU_INLINE void append(V& v, int& at, A a) {
  if constexpr (shape<A>::size) {
    for (int i = 0; i < shape<A>::size; ++i) v[at++] = (element<V>)a[i];
  } else {
    v[at++] = (element<V>)a;
  }
}
template <class V> EMU_INLINE V make() { return V(0); }
template <class V, class A> EMU_INLINE V make(A a) {
  V v;
  if constexpr (shape<A>::size) {
    static_assert(shape<A>::size == shape<V>::size, "a vector is made of a vector of its own size");
    for (int i = 0; i < shape<V>::size; ++i) v[i] = (element<V>)a[i];
  } else {
    for (int i = 0; i < shape<V>::size; ++i) v[i] = (element<V>)a;
  }
  return v;
}
template <class V, class A, class B, class... R> EMU_INLINE V make(A a, B b, R... rest) {
  V v;
  int at = 0;
  append(v, at, a);
  append(v, at, b);
  int all[] = {0, (append(v, at, rest), 0)...};
  (void)all;
  return v;
}
template <class T, int N> struct packed {  // no padding, aligned as its element
  T e[N];
  EMU_INLINE operator metal::vec<T, N>() const {
    metal::vec<T, N> v;
    for (int i = 0; i < N; ++i) v[i] = e[i];
    return v;
  }
  packed() = default;
  EMU_INLINE packed(metal::vec<T, N> v) {
    for (int i = 0; i < N; ++i) e[i] = v[i];
  }
  EMU_INLINE T operator[](int i) const { return e[i]; }
};
template <class T, int N> struct shape<packed<T, N>> {
  using element = T;
  static constexpr int size = N;
};
template <class T> EMU_INLINE T* shared(unsigned id, const char* name, EMU_HERE) {
  return (T*)emu_threadgroup_memory(id, sizeof(T), name, here);
}
EMU_INLINE uint3 three(const uint32_t* at) {
  uint3 v;
  v[0] = at[0], v[1] = at[1], v[2] = at[2];
  return v;
}
}  // namespace emu
#define EMU_PACKED(T)                          \
  using packed_##T##2 = emu::packed<T, 2>;     \
  using packed_##T##3 = emu::packed<T, 3>;     \
  using packed_##T##4 = emu::packed<T, 4>;
EMU_PACKED(float) EMU_PACKED(half) EMU_PACKED(uint) EMU_PACKED(int) EMU_PACKED(ushort) EMU_PACKED(uchar)

template <class To, class From> EMU_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type takes types of one size");
  return __builtin_bit_cast(To, from);
}
namespace metal {
using ::as_type;
}

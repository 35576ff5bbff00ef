/* What all kernels of portable arithmetic share.

   The bits of a result are those of the C program: IEEE-754 binary32 and binary64, round to nearest
   even, one fixed order, explicit fused multiply-adds, no contraction by the compiler
   (-ffp-contract=off), no functions of the C library. The width of vectors, tiles, blocks and the
   compiler can't change them.

   A kernel is `PORTABLE void name(...)`: pointers and sizes (`long`), no allocation, no state. It
   gets contiguous arrays unless it says otherwise; memory that it needs is an argument, `scratch`.

   An operation has the same bits wherever an element lies: the tail of a loop runs the same code as
   its body. So loops are written for one element, and the compiler makes vectors of them. */
#ifndef EVENSTEP_PORTABLE_H
#define EVENSTEP_PORTABLE_H

#include <stdint.h>
#include <string.h>

#define PORTABLE __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long larger(long a, long b) { return a > b ? a : b; }

/* Copy numbers, eight at a time, without a call. The last ones may be copied twice. */
INLINE void copy_floats(long n, const float *from, float *to) {
  for (long i = 0; i + 8 <= n; i += 8) memcpy(to + i, from + i, 32);
  if (n >= 8) memcpy(to + n - 8, from + n - 8, 32);
  else if (n >= 4) memcpy(to, from, 16), memcpy(to + n - 4, from + n - 4, 16);
  else for (long i = 0; i < n; i++) to[i] = from[i];
}

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE uint64_t bits_of_double(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
INLINE double double_of(uint64_t u) { double x; memcpy(&x, &u, 8); return x; }

/* a * b + c, rounded once.

   Without an instruction for it: the product of two floats is exact in double. The sum is rounded to
   odd (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008), so that rounding
   it to float gives what one rounding would: a double has more than two bits more than needed. */
#if defined(__FMA__) || defined(__aarch64__)
INLINE float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fma32(float a, float b, float c) {
  double product = (double)a * (double)b, addend = (double)c;
  double sum = product + addend;
  double part = sum - product;
  double error = (product - (sum - part)) + (addend - part);
  uint64_t u = bits_of_double(sum);
  int is_finite = (u & 0x7ff0000000000000u) != 0x7ff0000000000000u;
  int is_even = !(u & 1);
  /* The exact sum lies between `sum` and its neighbour on the side of `error`. */
  int is_outward = (error > 0) == (sum > 0);
  uint64_t odd = is_outward ? u + 1 : u - 1;
  u = is_finite & is_even & (error != 0) ? odd : u;
  return (float)double_of(u);
}
#endif

#endif

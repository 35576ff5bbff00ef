/* Which of the libraries this processor can run. */
#include <stdlib.h>

#include "portable.h"

/* The name of the largest library that this processor runs; or, if `asks`, of that to load: for
   tests, the environment variable EVENSTEP_PORTABLE names a smaller one, with the same bits. */
PORTABLE const char *portable_variant(long asks) {
  const char *asked = asks ? getenv("EVENSTEP_PORTABLE") : 0;
  if (asked && *asked) return asked;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2"))
    return "avx2";
#endif
  return "plain";
}

/* The library's own name. */
PORTABLE const char *portable_name(void) { return VARIANT; }

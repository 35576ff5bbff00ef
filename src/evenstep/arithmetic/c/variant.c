/* Which of the libraries this processor can run. */
#include <stdlib.h>

#include "portable.h"

/* The name of the library to load. The environment variable EVENSTEP_PORTABLE overrides it, with
   the name of a smaller one ("plain", "avx2"); it is for tests, since the bits are the same. */
PORTABLE const char *portable_variant(void) {
  const char *asked = getenv("EVENSTEP_PORTABLE");
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

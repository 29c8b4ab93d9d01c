/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What a program may ask of libanabranch.so. The library is preloaded, not linked: declare these
 * as weak, or look them up with dlsym(RTLD_DEFAULT, ...), so that the program also runs without it.
 * All functions may be called by any thread at any time, before MPI_Init and after MPI_Finalize too.
 */
#ifndef ANABRANCH_H
#define ANABRANCH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the library, as in "0.1.0". The string is never freed. */
const char *anabranch_version(void);

/* Present value of a counter of this process, or UINT64_MAX if no counter has this name.
 * Counters only grow. Useful ones: "sends_device", "sends_descriptor", "receives_direct" and
 * "receives_direct_bytes", "fallback_too_small". */
uint64_t anabranch_counter(const char *name);

/* Name of counter number index, for index = 0, 1, ...; NULL past the last one. The string is never
 * freed. The names and their meaning are those of the JSON that ANABRANCH_STATS=FILE writes, and
 * "fallback_REASON", "fallback_REASON_bytes" for its fallbacks. */
const char *anabranch_counter_name(unsigned index);

#ifdef __cplusplus
}
#endif

#endif

// The part of Metal's standard library that kernels of language models use, for clang on a CPU. Written after the
// descriptions in the Metal Shading Language Specification (Apple, version 3.2 and 4).
#pragma once
#include "../emulator.h"
// Without debug information an inlined library function takes the line of its caller, so reports name the kernel's line.
#define EMU_INLINE inline __attribute__((always_inline, nodebug))
// Work of the emulator itself, not of the kernel: never inlined, so never instrumented.
#define EMU_OUTSIDE __attribute__((noinline, nodebug, no_sanitize("kernel-address", "undefined")))
#define EMU_HERE EmuSite here = {__builtin_FILE(), (uint32_t)__builtin_LINE(), (uint32_t)__builtin_COLUMN()}

#include "types.h"
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomic.h"
#include "mlx.h"
#include "language.h"

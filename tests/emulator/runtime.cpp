// The machine a kernel runs on: every thread of a threadgroup ("lane") is a fiber on its own stack. A lane runs until it
// waits at a barrier or a simdgroup operation, returns, or fails; between waits the order of lanes is shuffled by a seed.
// In check mode the compiler calls a hook (the interface of the kernel's AddressSanitizer) at every load and store.
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "include/emulator.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// ---------------------------------------------------------------- shared with launch.py and reports.py: the same layout

enum Kind : u32 {
  OUT_OF_BOUNDS = 1,
  RACE,
  UNINITIALISED,
  NEVER_WRITTEN,
  DIVERGENT_SIMD,
  DIVERGENT_BARRIER,
  THREADGROUP_LIMIT,
  UNDEFINED,
  WRITE_TO_INPUT,
  CRASH,
  ENDLESS,
};
enum Detail : u32 {
  NONE, READ, WRITE, ARRAY_INDEX,                                       // of OUT_OF_BOUNDS, RACE, UNINITIALISED
  SIMD_RETURNED, SIMD_ELSEWHERE, SIMD_INACTIVE, SIMD_MATRIX,            // of DIVERGENT_SIMD
  BARRIER_RETURNED, BARRIER_ELSEWHERE,                                  // of DIVERGENT_BARRIER
  SHIFT, OVERFLOW, DIVISION, MISALIGNED, CAST, OTHER_UNDEFINED,         // of UNDEFINED
};
const int THREADGROUP_BUFFER = -2, NO_BUFFER = -1;
const u32 NO_LANE = ~0u;

struct Report {
  u32 kind, detail, lane, group[3];
  u32 other_lane, other_group, other_wrote, weak;  // the earlier access of a race
  int32_t buffer;
  u32 line, other_line;  // where known without the pc
  u32 padding;
  const char* file;
  const char* name;  // of a threadgroup variable
  u64 offset, size, pc, other_pc;
};
struct Traffic {
  u64 read, written, distinct_read, distinct_written, simdgroup_read, atomics;
};
enum BufferKind : u32 { INPUT, OUTPUT, CONSTANT };
struct Buffer {
  char* data;
  u64 size;
  u32 kind, initialised;
  Traffic traffic;
};
struct Launch {
  u32 grid[3], threadgroup[3];
  void (*entry)(void**);
  void** arguments;
  Buffer* buffer;
  u32 buffers, order, seed, check;
  u64 access_limit;
  // results
  u64 lanes, threadgroups, barriers, simdgroup_barriers, simd_ops, matrix_ops;
  u64 threadgroup_memory, threadgroup_read, threadgroup_written;
  u32 finished, reports;
  Report report[64];
};
enum Order : u32 { ASCENDING, DESCENDING, RANDOM };

// ---------------------------------------------------------------- state of the one launch that is running

const int MAX_LANES = 1024, SIMD = 32;
const size_t STACK = 256 * 1024, PAGE = 4096, ARENA = 256 * 1024, THREADGROUP_MEMORY = 32 * 1024, GUARD = 2ull << 30;

const u32 NO_FENCE = ~0u;
enum State : u32 { READY, AT_SIMD, AT_BARRIER, RETURNED };
struct Lane {
  void* sp;
  EmuLane attributes;
  State state;
  EmuSite site;
  EmuMeeting* meeting;
  alignas(32) u8 brought[32];
  u32 fence;  // of the simdgroup barrier it waits at: which memory; NO_FENCE at another operation
  char* stack;
  u32 epoch[2];  // simdgroup barriers passed, per memory (device, threadgroup)
  u32 met;       // simdgroup operations passed
};
static Lane lanes[MAX_LANES];
static int live, current;
static char* stacks;
static Launch* launch;
static void* scheduler_sp;
static bool aborted;
static u64 accesses;
static u32 group_number, group[3], epoch[2], barrier_memory, random_state;
static EmuMeeting meetings[MAX_LANES / SIMD][2];  // a lane still reading one keeps the next but one from starting
static u32 meeting_count[MAX_LANES / SIMD];
static int waiting[MAX_LANES / SIMD], returned[MAX_LANES / SIMD];  // lanes of a simdgroup, for a meeting and for good
extern "C" {
EmuLane* emu_lane;
}

extern "C" __attribute__((naked)) void emu_switch(void** save, void* to) {
  asm volatile(
      "push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15; mov %rsp,(%rdi); mov %rsi,%rsp;"
      "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
static void yield() { emu_switch(&lanes[current].sp, scheduler_sp); }
static void run_lane() {
  launch->entry(launch->arguments);
  lanes[current].state = RETURNED;
  returned[current / SIMD]++;
  for (;;) yield();
}
[[noreturn]] static void abort_launch() {
  aborted = true;
  for (;;) yield();
}

static u32 random_below(u32 n) {
  random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
  return (u64)random_state * n >> 32;
}
template <class T> static T min(T a, T b) { return b < a ? b : a; }
template <class T> static void shuffle(T* items, u32 n) {
  for (u32 i = n; i > 1; --i) {
    u32 j = random_below(i);
    T kept = items[i - 1];
    items[i - 1] = items[j], items[j] = kept;
  }
}
template <class T> static T* map_zeros(u64 n) {
  void* at = mmap(0, n * sizeof(T) + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : (T*)at;
}
template <class T> static void unmap(T* at, u64 n) {
  if (at) munmap((void*)at, n * sizeof(T) + 1);
}

// One report a site, kind and buffer.
static Report* add_report(Kind kind, Detail detail, int buffer, u64 pc, u32 line = 0) {
  for (u32 i = 0; i < launch->reports; ++i) {
    Report& r = launch->report[i];
    if (r.kind == kind && r.detail == detail && r.pc == pc && r.line == line && r.buffer == buffer) return nullptr;
  }
  if (launch->reports == 64) return nullptr;
  Report& r = launch->report[launch->reports++];
  memset((void*)&r, 0, sizeof r);
  r.kind = kind, r.detail = detail, r.lane = current, r.other_lane = NO_LANE, r.buffer = buffer, r.pc = pc, r.line = line;
  for (int d = 0; d < 3; ++d) r.group[d] = group[d];
  return &r;
}
static Report* report_at(Kind kind, Detail detail, const Lane& lane) {
  Report* r = add_report(kind, detail, NO_BUFFER, 0, lane.site.line);
  if (r) r->file = lane.site.file, r->lane = &lane - lanes;
  return r;
}

// ---------------------------------------------------------------- simdgroup operations and barriers

static bool same_site(const Lane& a, const Lane& b) {
  if (a.site.line != b.site.line || a.site.column != b.site.column) return false;
  return a.site.file == b.site.file || !strcmp(a.site.file, b.site.file);
}
static int first_of(int simdgroup) { return simdgroup * SIMD; }
static int end_of(int simdgroup) { return min(live, simdgroup * SIMD + SIMD); }

static void meet(int simdgroup, u32 present) {
  EmuMeeting& m = meetings[simdgroup][meeting_count[simdgroup]++ & 1];
  m.present = present, m.done = false;
  (lanes[first_of(simdgroup) + __builtin_ctz(present)].fence == NO_FENCE ? launch->simd_ops : launch->simdgroup_barriers)++;
  for (int i = 0; i < SIMD; ++i) {
    if (!(present >> i & 1)) continue;
    Lane& lane = lanes[first_of(simdgroup) + i];
    memcpy(m.brought[i], lane.brought, sizeof lane.brought);
    lane.meeting = &m, lane.state = READY, lane.met++;
    waiting[simdgroup]--;
    if (lane.fence == NO_FENCE) continue;
    lane.epoch[0] += (lane.fence & EMU_DEVICE) != 0, lane.epoch[1] += (lane.fence & EMU_THREADGROUP) != 0;
  }
}

// All that have not returned wait at one site.
static bool meet_if_together(int simdgroup) {
  u32 present = 0;
  Lane* first = nullptr;
  for (int i = first_of(simdgroup); i < end_of(simdgroup); ++i) {
    Lane& lane = lanes[i];
    if (lane.state == RETURNED) continue;
    if (lane.state != AT_SIMD || (first && !same_site(*first, lane))) return false;
    if (!first) first = &lane;
    present |= 1u << (i % SIMD);
  }
  if (!first) return false;
  if (returned[simdgroup])
    if (Report* r = report_at(DIVERGENT_SIMD, SIMD_RETURNED, *first)) r->size = returned[simdgroup];
  meet(simdgroup, present);
  return true;
}

// Nobody can run: the most numerous of those that wait at one site go on without the others.
static bool meet_divergent(int simdgroup) {
  u32 best = 0;
  for (int i = first_of(simdgroup); i < end_of(simdgroup); ++i) {
    if (lanes[i].state != AT_SIMD) continue;
    u32 present = 0;
    for (int j = first_of(simdgroup); j < end_of(simdgroup); ++j)
      if (lanes[j].state == AT_SIMD && same_site(lanes[i], lanes[j])) present |= 1u << (j % SIMD);
    if (__builtin_popcount(present) > __builtin_popcount(best)) best = present;
  }
  if (!best) return false;
  Report* r = report_at(DIVERGENT_SIMD, SIMD_ELSEWHERE, lanes[first_of(simdgroup) + __builtin_ctz(best)]);
  if (r) {
    r->size = __builtin_popcount(best);
    for (int i = first_of(simdgroup); i < end_of(simdgroup); ++i)
      if (!(best >> (i % SIMD) & 1) && lanes[i].state != RETURNED) r->other_lane = i, r->other_line = lanes[i].site.line;
  }
  meet(simdgroup, best);
  return true;
}

static void spend(u64 pc) {
  if (++accesses <= launch->access_limit) return;
  if (pc)
    add_report(ENDLESS, NONE, NO_BUFFER, pc);
  else
    report_at(ENDLESS, NONE, lanes[current]);
  abort_launch();
}

static EmuMeeting* wait_for_simdgroup(EmuSite site, u32 fence) {
  Lane& lane = lanes[current];
  lane.site = site, lane.state = AT_SIMD, lane.fence = fence;
  spend(0);
  int simdgroup = current / SIMD;
  if (++waiting[simdgroup] + returned[simdgroup] == end_of(simdgroup) - first_of(simdgroup)) meet_if_together(simdgroup);
  yield();
  return lane.meeting;
}
extern "C" EmuMeeting* emu_meet(EmuSite site, const void* brought, unsigned bytes) {
  memcpy(lanes[current].brought, brought, bytes);
  return wait_for_simdgroup(site, NO_FENCE);
}
extern "C" void emu_simdgroup_barrier(EmuSite site, unsigned memory) { wait_for_simdgroup(site, memory); }
extern "C" void emu_threadgroup_barrier(EmuSite site, unsigned memory) {
  lanes[current].site = site, lanes[current].state = AT_BARRIER;
  barrier_memory = memory;
  spend(0);
  yield();
}
extern "C" void emu_simd_fault(EmuSimdFault fault, unsigned lane) {
  Report* r = report_at(DIVERGENT_SIMD, fault == EMU_SHUFFLE_INACTIVE ? SIMD_INACTIVE : SIMD_MATRIX, lanes[current]);
  if (r) r->other_lane = fault == EMU_SHUFFLE_INACTIVE && lane < SIMD ? first_of(current / SIMD) + lane : NO_LANE;
}
extern "C" void emu_matrix_multiplied() { launch->matrix_ops++; }

// All lanes wait at a barrier or have returned.
static void pass_barrier(int gone) {
  Lane* first = nullptr;
  for (int i = 0; i < live; ++i) {
    Lane& lane = lanes[i];
    if (lane.state != AT_BARRIER) continue;
    if (!first) first = &lane;
    if (!same_site(*first, lane)) {
      Report* r = report_at(DIVERGENT_BARRIER, BARRIER_ELSEWHERE, *first);
      if (r) r->other_lane = i, r->other_line = lane.site.line;
    }
    lane.state = READY;
  }
  if (gone)
    if (Report* r = report_at(DIVERGENT_BARRIER, BARRIER_RETURNED, *first)) r->size = gone;
  if (barrier_memory & EMU_DEVICE) epoch[0]++;
  if (barrier_memory & EMU_THREADGROUP) epoch[1]++;
  launch->barriers++;
}

// ---------------------------------------------------------------- who touched a byte last

struct Access {
  u32 group, epoch, simd_epoch, met, pc;
  u16 lane;
  bool atomic;
};
// Enough readers that a later write by any lane meets one it is not ordered with, if there was one: the latest, another
// lane of its simdgroup, one of another simdgroup, one of another threadgroup.
struct Byte {
  Access writer, reader, twin, stranger, foreigner;
};
struct Touch {
  u32 group, simdgroups;
  u8 read, written;
};
struct Variable {
  u32 offset, size;
  const char* name;
};
static char arena[ARENA] __attribute__((aligned(4096)));
static u32 arena_end;
static const int MAX_VARIABLES = 256;
static Variable variables[MAX_VARIABLES];
static Byte* arena_bytes;
static const int MAX_BUFFERS = 64;
static Byte* output_bytes[MAX_BUFFERS];
static Touch* touches[MAX_BUFFERS];
static const char* code_base;

static Access now(int memory, u64 pc, bool atomic) {
  const Lane& lane = lanes[current];
  return {group_number, epoch[memory], lane.epoch[memory], lane.met, (u32)(pc - (u64)code_base), (u16)current, atomic};
}
static bool ordered(const Access& before, const Access& after) {
  if (before.group != after.group) return false;
  if (before.lane == after.lane || before.epoch != after.epoch) return true;
  return before.lane / SIMD == after.lane / SIMD && before.simd_epoch != after.simd_epoch;
}
static bool conflict(const Access& before, const Access& after, bool in_threadgroup) {
  if (!before.group || (in_threadgroup && before.group != after.group)) return false;
  return !(before.atomic && after.atomic) && !ordered(before, after);
}
static void add_reader(Byte& byte, const Access& a) {
  if (byte.reader.group != a.group) {
    if (byte.reader.group) byte.foreigner = byte.reader;
    byte.reader = a, byte.twin = {}, byte.stranger = {};
  } else if (byte.reader.lane == a.lane) {
    byte.reader = a;
  } else if (byte.reader.lane / SIMD == a.lane / SIMD) {
    byte.twin = byte.reader, byte.reader = a;
  } else {
    Access old = byte.stranger;
    byte.stranger = byte.reader;
    bool twin = old.group == a.group && old.lane / SIMD == a.lane / SIMD && old.lane != a.lane;
    byte.twin = twin ? old : Access{};
    byte.reader = a;
  }
}
static void report_race(const Access& before, const Access& after, bool write, bool before_wrote, int buffer,
                        const char* name, u64 offset, u64 size) {
  Report* r = add_report(RACE, write ? WRITE : READ, buffer, (u64)code_base + after.pc);
  if (!r) return;
  r->name = name, r->offset = offset, r->size = size;
  r->other_lane = before.lane, r->other_group = before.group - 1, r->other_wrote = before_wrote;
  r->other_pc = (u64)code_base + before.pc;
  r->weak = before.group == after.group && before.lane / SIMD == after.lane / SIMD && before.met != after.met;
}
static void touch_bytes(Byte* bytes, u64 n, bool write, bool atomic, bool initialised, int buffer, const char* name,
                        u64 offset, u64 pc) {
  bool in_threadgroup = buffer == THREADGROUP_BUFFER;
  Access a = now(in_threadgroup, pc, atomic);
  for (u64 i = 0; i < n; ++i) {
    Byte& byte = bytes[i];
    bool written = in_threadgroup ? byte.writer.group == a.group : byte.writer.group != 0;
    if (!write && !written && !initialised) {
      Report* r = add_report(UNINITIALISED, READ, buffer, pc);
      if (r) r->name = name, r->offset = offset + i, r->size = n;
    }
    if (conflict(byte.writer, a, in_threadgroup)) report_race(byte.writer, a, write, true, buffer, name, offset + i, n);
    if (write) {
      const Access* readers[] = {&byte.reader, &byte.twin, &byte.stranger, &byte.foreigner};
      for (const Access* reader : readers)
        if (conflict(*reader, a, in_threadgroup)) {
          report_race(*reader, a, true, false, buffer, name, offset + i, n);
          break;
        }
      byte.writer = a;
    } else {
      add_reader(byte, a);
    }
  }
}
static void touch_traffic(u32 buffer, u64 offset, u64 n, bool write) {
  Traffic& t = launch->buffer[buffer].traffic;
  (write ? t.written : t.read) += n;
  u32 bit = 1u << (current / SIMD);
  for (Touch *at = touches[buffer] + offset, *end = at + n; at != end; ++at) {
    if (write) {
      t.distinct_written += !at->written;
      at->written = 1;
      continue;
    }
    t.distinct_read += !at->read;
    at->read = 1;
    if (at->group != group_number) at->group = group_number, at->simdgroups = 0;
    t.simdgroup_read += !(at->simdgroups & bit);
    at->simdgroups |= bit;
  }
}

extern "C" void* emu_threadgroup_memory(unsigned id, size_t bytes, const char* name, EmuSite site) {
  if (id >= MAX_VARIABLES) return nullptr;
  Variable& v = variables[id];
  if (v.name) return arena + v.offset;
  u32 offset = (arena_end + 256 + 63) & ~63u;
  launch->threadgroup_memory += (bytes + 15) & ~15ull;
  if (launch->threadgroup_memory > THREADGROUP_MEMORY) {
    lanes[current].site = site;
    if (Report* r = report_at(THREADGROUP_LIMIT, NONE, lanes[current])) r->name = name, r->size = launch->threadgroup_memory;
  }
  if (offset + bytes > ARENA) abort_launch();
  v = {offset, (u32)bytes, name};
  arena_end = offset + bytes;
  memset(arena + offset, 0xff, bytes);
  return arena + offset;
}

// ---------------------------------------------------------------- loads and stores (check mode)

static int last_buffer;
static int buffer_of(u64 at) {
  if ((u32)last_buffer < launch->buffers) {
    const Buffer& b = launch->buffer[last_buffer];
    if (at - (u64)b.data < b.size) return last_buffer;
  }
  for (u32 i = 0; i < launch->buffers; ++i)
    if (at - (u64)launch->buffer[i].data < launch->buffer[i].size) return last_buffer = i;
  return NO_BUFFER;
}
// The buffer whose surroundings an address lies in.
static int buffer_near(u64 at) {
  for (u32 i = 0; i < launch->buffers; ++i) {
    const Buffer& b = launch->buffer[i];
    if (at - ((u64)b.data - GUARD) < 2 * GUARD + b.size) return i;
  }
  return NO_BUFFER;
}
[[noreturn]] static void out_of_bounds(bool write, int buffer, const char* name, u64 offset, u64 n, u64 pc) {
  if (Report* r = add_report(OUT_OF_BOUNDS, write ? WRITE : READ, buffer, pc)) r->name = name, r->offset = offset, r->size = n;
  abort_launch();
}
static void access_arena(u64 at, u64 n, bool write, bool atomic, u64 pc) {
  u64 offset = at - (u64)arena;
  (write ? launch->threadgroup_written : launch->threadgroup_read) += n;
  const Variable* nearest = nullptr;
  for (int i = 0; i < MAX_VARIABLES; ++i) {
    const Variable& v = variables[i];
    if (!v.name) continue;
    if (offset >= v.offset && offset + n <= v.offset + v.size)
      return touch_bytes(arena_bytes + offset, n, write, atomic, false, THREADGROUP_BUFFER, v.name, offset - v.offset, pc);
    if (v.offset < offset + 256 && (!nearest || v.offset > nearest->offset)) nearest = &v;
  }
  out_of_bounds(write, THREADGROUP_BUFFER, nearest ? nearest->name : "?", nearest ? offset - nearest->offset : offset, n, pc);
}
static void access_memory(u64 at, u64 n, bool write, bool atomic, u64 pc) {
  if (!launch || !launch->check || !n) return;
  spend(pc);
  if (at - (u64)lanes[current].stack < STACK) return;
  if (at - (u64)arena < ARENA) return access_arena(at, n, write, atomic, pc);
  int i = buffer_of(at);
  if (i == NO_BUFFER) {
    int near = buffer_near(at);
    if (near != NO_BUFFER) out_of_bounds(write, near, nullptr, at - (u64)launch->buffer[near].data, n, pc);
    return;  // a constant of the program
  }
  Buffer& b = launch->buffer[i];
  u64 offset = at - (u64)b.data;
  if (offset + n > b.size) out_of_bounds(write, i, nullptr, offset, n, pc);
  if (b.kind == CONSTANT) return;
  if (write && b.kind == INPUT)
    if (Report* r = add_report(WRITE_TO_INPUT, WRITE, i, pc)) r->offset = offset, r->size = n;
  touch_traffic(i, offset, n, write);
  if (b.kind == OUTPUT) touch_bytes(output_bytes[i] + offset, n, write, atomic, b.initialised, i, nullptr, offset, pc);
}
static void access_atomic(u64 at, unsigned bytes, bool write, u64 pc) {
  if (!launch->check) return;
  int i = buffer_of(at);
  if (i != NO_BUFFER) launch->buffer[i].traffic.atomics++;
  access_memory(at, bytes, write, true, pc);
}
static bool never_written(u64 at) {
  if (at - (u64)arena < ARENA) return arena_bytes[at - (u64)arena].writer.group != group_number;
  int i = buffer_of(at);
  if (i == NO_BUFFER || launch->buffer[i].kind != OUTPUT || launch->buffer[i].initialised) return false;
  return !output_bytes[i][at - (u64)launch->buffer[i].data].writer.group;
}
extern "C" void emu_atomic_store(const void* at, unsigned bytes, const void* pc) {
  access_atomic((u64)at, bytes, true, (u64)pc);
}
extern "C" void emu_atomic(const void* at, unsigned bytes, bool writes, const void* pc) {
  // A change reads first: of what nobody wrote, an error of its own.
  if (launch->check && (!writes || never_written((u64)at))) access_atomic((u64)at, bytes, false, (u64)pc);
  if (writes) access_atomic((u64)at, bytes, true, (u64)pc);
}
#define PC (u64) __builtin_return_address(0)
#define HOOKS(N)                                                                                          \
  extern "C" void __asan_load##N##_noabort(u64 at) { access_memory(at, N, false, false, PC); }            \
  extern "C" void __asan_store##N##_noabort(u64 at) { access_memory(at, N, true, false, PC); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
extern "C" void __asan_loadN_noabort(u64 at, u64 n) { access_memory(at, n, false, false, PC); }
extern "C" void __asan_storeN_noabort(u64 at, u64 n) { access_memory(at, n, true, false, PC); }
extern "C" void* __asan_memcpy(void* to, const void* from, u64 n) {
  access_memory((u64)from, n, false, false, PC);
  access_memory((u64)to, n, true, false, PC);
  return memcpy(to, from, n);
}
extern "C" void* __asan_memmove(void* to, const void* from, u64 n) {
  access_memory((u64)from, n, false, false, PC);
  access_memory((u64)to, n, true, false, PC);
  return memmove(to, from, n);
}
extern "C" void* __asan_memset(void* to, int value, u64 n) {
  access_memory((u64)to, n, true, false, PC);
  return memset(to, value, n);
}
extern "C" void __asan_handle_no_return() {}

// ---------------------------------------------------------------- undefined behaviour

static void undefined(Detail detail, u64 pc, bool fatal) {
  if (!launch) return;
  add_report(UNDEFINED, detail, NO_BUFFER, pc);
  if (fatal) abort_launch();
}
#define UNDEFINED_HANDLER(NAME, DETAIL, FATAL) \
  extern "C" void __ubsan_handle_##NAME(void*) { undefined(DETAIL, PC, FATAL); }
UNDEFINED_HANDLER(add_overflow, OVERFLOW, false)
UNDEFINED_HANDLER(sub_overflow, OVERFLOW, false)
UNDEFINED_HANDLER(mul_overflow, OVERFLOW, false)
UNDEFINED_HANDLER(negate_overflow, OVERFLOW, false)
UNDEFINED_HANDLER(divrem_overflow, DIVISION, true)
UNDEFINED_HANDLER(shift_out_of_bounds, SHIFT, false)
UNDEFINED_HANDLER(type_mismatch_v1, MISALIGNED, true)
UNDEFINED_HANDLER(alignment_assumption, MISALIGNED, true)
UNDEFINED_HANDLER(float_cast_overflow, CAST, false)
UNDEFINED_HANDLER(missing_return, OTHER_UNDEFINED, true)
extern "C" void __ubsan_handle_out_of_bounds(void*) {
  if (!launch) return;
  add_report(OUT_OF_BOUNDS, ARRAY_INDEX, NO_BUFFER, PC);
  abort_launch();
}

// Conversions the compiler calls by name.
static u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
extern "C" __bf16 __truncsfbf2(float x) {
  u32 bits = bits_of(x);
  u16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, x == x ? rounded : (u16)(bits >> 16 | 0x40));
}
extern "C" __bf16 __truncdfbf2(double x) { return __truncsfbf2((float)x); }

// ---------------------------------------------------------------- faults of the processor

static char signal_stack[64 * 1024], refuge[4096] __attribute__((aligned(64)));
static pid_t owner;
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction previous[4];
static stack_t previous_stack;

static void on_fault(int number, siginfo_t* info, void* context) {
  if (!launch || owner != (pid_t)syscall(SYS_gettid)) {
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &previous[i], nullptr);
    return;  // it happens again, and whoever was there before hears of it
  }
  auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  u64 pc = registers[REG_RIP] + 1, at = (u64)info->si_addr;
  bool memory = number == SIGSEGV || number == SIGBUS;
  int near = memory ? buffer_near(at) : NO_BUFFER;
  if (near != NO_BUFFER) {
    if (Report* r = add_report(OUT_OF_BOUNDS, NONE, near, pc)) r->offset = at - (u64)launch->buffer[near].data;
  } else if (number == SIGFPE) {
    add_report(UNDEFINED, DIVISION, NO_BUFFER, pc);
  } else if (memory && info->si_code == SI_KERNEL) {  // an aligned move of an address that is not
    add_report(UNDEFINED, MISALIGNED, NO_BUFFER, pc);
  } else {
    if (Report* r = add_report(CRASH, NONE, NO_BUFFER, pc)) r->offset = at, r->size = number;
  }
  registers[REG_RIP] = (greg_t)(void (*)())abort_launch;
  registers[REG_RSP] = ((greg_t)(refuge + sizeof refuge) & ~63ll) - 8;  // the lane's stack may be what is broken
}
static void catch_faults() {
  owner = (pid_t)syscall(SYS_gettid);
  stack_t stack = {};
  stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &previous[i]);
}
static void release_faults() {
  for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

// ---------------------------------------------------------------- buffers and the launch

static u64 pages(u64 bytes) { return bytes ? (bytes + PAGE - 1) & ~(u64)(PAGE - 1) : PAGE; }

// Memory that ends (in steps of 16 bytes) where two unreadable gigabytes begin; as many lie before it.
extern "C" void* emu_allocate(u64 bytes) {
  u64 data = pages(bytes);
  char* start = (char*)mmap(0, 2 * GUARD + data, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED || mprotect(start + GUARD, data, PROT_READ | PROT_WRITE)) return nullptr;
  return start + GUARD + data - ((bytes + 15) & ~15ull);
}
extern "C" void emu_free(void* at, u64 bytes) {
  u64 data = pages(bytes);
  munmap((char*)at + ((bytes + 15) & ~15ull) - data - GUARD, 2 * GUARD + data);
}

static void prepare() {
  if (!stacks) {
    stacks = map_zeros<char>(MAX_LANES * (STACK + PAGE));
    for (int i = 0; i < MAX_LANES; ++i) mprotect(stacks + i * (STACK + PAGE), PAGE, PROT_NONE);
  }
  arena_end = 0;
  memset((void*)variables, 0, sizeof variables);
  epoch[0] = epoch[1] = 1, group_number = 0, accesses = 0, aborted = false, current = 0;
  random_state = launch->seed * 2654435761u + 12345;
  if (!launch->check) return;
  arena_bytes = map_zeros<Byte>(ARENA);
  for (u32 i = 0; i < launch->buffers; ++i) {
    const Buffer& b = launch->buffer[i];
    output_bytes[i] = b.kind == OUTPUT ? map_zeros<Byte>(b.size) : nullptr;
    touches[i] = b.kind != CONSTANT ? map_zeros<Touch>(b.size) : nullptr;
  }
}
static void finish() {
  launch->finished = !aborted;
  if (!launch->check) return;
  for (u32 i = 0; i < launch->buffers; ++i) {
    const Buffer& b = launch->buffer[i];
    if (b.kind == OUTPUT && !b.initialised && !aborted) {
      u64 missing = 0, first = 0;
      for (u64 k = 0; k < b.size; ++k)
        if (!output_bytes[i][k].writer.group && !missing++) first = k;
      if (missing)
        if (Report* r = add_report(NEVER_WRITTEN, NONE, i, 0)) r->offset = first, r->size = missing, r->lane = NO_LANE;
    }
    unmap(output_bytes[i], b.size), unmap(touches[i], b.size);
  }
  unmap(arena_bytes, ARENA);
}

static void start_group(u32 number, const u32 groups[3]) {
  group[0] = number % groups[0], group[1] = number / groups[0] % groups[1], group[2] = number / groups[0] / groups[1];
  group_number = number + 1;
  epoch[0]++, epoch[1]++;
  u32 size[3], full = 1;
  for (int d = 0; d < 3; ++d) {
    size[d] = min(launch->threadgroup[d], launch->grid[d] - group[d] * launch->threadgroup[d]);
    full *= launch->threadgroup[d];
  }
  live = size[0] * size[1] * size[2];
  memset(waiting, 0, sizeof waiting), memset(returned, 0, sizeof returned);
  for (const Variable& v : variables)
    if (v.name) memset(arena + v.offset, 0xff, v.size);
  for (int i = 0; i < live; ++i) {
    Lane& lane = lanes[i];
    EmuLane& a = lane.attributes;
    u32 at[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int d = 0; d < 3; ++d) {
      a.position_in_group[d] = at[d], a.group[d] = group[d], a.groups[d] = groups[d], a.grid[d] = launch->grid[d];
      a.position_in_grid[d] = group[d] * launch->threadgroup[d] + at[d];
      a.group_size[d] = size[d], a.full_group_size[d] = launch->threadgroup[d];
    }
    a.index_in_group = i, a.index_in_simdgroup = i % SIMD, a.simdgroup = i / SIMD;
    a.simdgroups = (live + SIMD - 1) / SIMD, a.full_simdgroups = (full + SIMD - 1) / SIMD;
    lane.state = READY, lane.epoch[0] = lane.epoch[1] = lane.met = 0;
    lane.site = {"", 0, 0};
    lane.stack = stacks + i * (STACK + PAGE) + PAGE;
    void** sp = (void**)(lane.stack + STACK - 64);
    *--sp = nullptr, *--sp = (void*)run_lane;
    for (int k = 0; k < 6; ++k) *--sp = nullptr;
    lane.sp = sp;
  }
  launch->lanes += live, launch->threadgroups++;
}
static void run_group() {
  static int turn[MAX_LANES];
  for (int i = 0; i < live; ++i) turn[i] = launch->order == DESCENDING ? live - 1 - i : i;
  int simdgroups = (live + SIMD - 1) / SIMD;
  for (;;) {
    if (launch->order == RANDOM) shuffle(turn, live);
    bool ran = false;
    for (int k = 0; k < live; ++k) {
      if (lanes[turn[k]].state != READY) continue;
      ran = true, current = turn[k], emu_lane = &lanes[current].attributes;
      emu_switch(&scheduler_sp, lanes[current].sp);
      if (aborted) return;
    }
    if (ran) continue;
    bool met = false;
    for (int s = 0; s < simdgroups; ++s) met |= meet_if_together(s);  // some have returned meanwhile
    if (met) continue;
    int stopped = 0, gone = 0;
    for (int i = 0; i < live; ++i) stopped += lanes[i].state == AT_BARRIER, gone += lanes[i].state == RETURNED;
    if (gone == live) return;
    if (stopped + gone == live) {
      pass_barrier(gone);
      continue;
    }
    for (int s = 0; s < simdgroups; ++s) meet_divergent(s);
  }
}
extern "C" int emu_launch(Launch* request, const char* base) {
  if (launch || request->buffers > MAX_BUFFERS) return 1;
  launch = request, code_base = base;
  u32 groups[3];
  for (int d = 0; d < 3; ++d) groups[d] = (launch->grid[d] + launch->threadgroup[d] - 1) / launch->threadgroup[d];
  u32 total = groups[0] * groups[1] * groups[2];
  u32* turn = map_zeros<u32>(total);
  prepare();
  for (u32 i = 0; i < total; ++i) turn[i] = launch->order == DESCENDING ? total - 1 - i : i;
  if (launch->order == RANDOM) shuffle(turn, total);
  catch_faults();
  for (u32 i = 0; i < total && !aborted; ++i) {
    start_group(turn[i], groups);
    run_group();
  }
  release_faults();
  unmap(turn, total);
  finish();
  launch = nullptr;
  return 0;
}

// What a kernel and the runtime (runtime.cpp) know of each other.
#pragma once
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;

// The values of the attributes ([[thread_position_in_grid]] ...) of one lane.
struct EmuLane {
  uint32_t position_in_grid[3], position_in_group[3], group[3], group_size[3], full_group_size[3], groups[3], grid[3];
  uint32_t index_in_group, index_in_simdgroup, simdgroup, simdgroups, full_simdgroups;
};

// One meeting of a simdgroup's lanes: who came, what each brought, and the result the first to resume works out for all.
struct EmuMeeting {
  uint32_t present;
  bool done;
  alignas(64) unsigned char brought[32][32];
  alignas(64) unsigned char result[256];
};

struct EmuSite {
  const char* file;
  uint32_t line, column;
};

enum EmuMemory { EMU_DEVICE = 1, EMU_THREADGROUP = 2 };  // as in metal::mem_flags
enum EmuSimdFault { EMU_SHUFFLE_INACTIVE, EMU_MATRIX_PARTIAL };

extern "C" {
extern EmuLane* emu_lane;
EmuMeeting* emu_meet(EmuSite site, const void* brought, unsigned bytes);
void emu_threadgroup_barrier(EmuSite site, unsigned memory);
void emu_simdgroup_barrier(EmuSite site, unsigned memory);
void* emu_threadgroup_memory(unsigned id, size_t bytes, const char* name, EmuSite site);
void emu_simd_fault(EmuSimdFault fault, unsigned lane);
void emu_atomic(const void* at, unsigned bytes, bool writes, const void* pc);
void emu_atomic_store(const void* at, unsigned bytes, const void* pc);
void emu_matrix_multiplied();
}

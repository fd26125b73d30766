// Words of the language that C++ does not have. Last, because it redefines them.
#pragma once
#define float2(...) emu::make<float2>(__VA_ARGS__)
#define float3(...) emu::make<float3>(__VA_ARGS__)
#define float4(...) emu::make<float4>(__VA_ARGS__)
#define half2(...) emu::make<half2>(__VA_ARGS__)
#define half3(...) emu::make<half3>(__VA_ARGS__)
#define half4(...) emu::make<half4>(__VA_ARGS__)
#define bfloat2(...) emu::make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) emu::make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) emu::make<bfloat4>(__VA_ARGS__)
#define bool2(...) emu::make<bool2>(__VA_ARGS__)
#define bool3(...) emu::make<bool3>(__VA_ARGS__)
#define bool4(...) emu::make<bool4>(__VA_ARGS__)
#define char2(...) emu::make<char2>(__VA_ARGS__)
#define char3(...) emu::make<char3>(__VA_ARGS__)
#define char4(...) emu::make<char4>(__VA_ARGS__)
#define short2(...) emu::make<short2>(__VA_ARGS__)
#define short3(...) emu::make<short3>(__VA_ARGS__)
#define short4(...) emu::make<short4>(__VA_ARGS__)
#define int2(...) emu::make<int2>(__VA_ARGS__)
#define int3(...) emu::make<int3>(__VA_ARGS__)
#define int4(...) emu::make<int4>(__VA_ARGS__)
#define long2(...) emu::make<long2>(__VA_ARGS__)
#define long3(...) emu::make<long3>(__VA_ARGS__)
#define long4(...) emu::make<long4>(__VA_ARGS__)
#define uchar2(...) emu::make<uchar2>(__VA_ARGS__)
#define uchar3(...) emu::make<uchar3>(__VA_ARGS__)
#define uchar4(...) emu::make<uchar4>(__VA_ARGS__)
#define ushort2(...) emu::make<ushort2>(__VA_ARGS__)
#define ushort3(...) emu::make<ushort3>(__VA_ARGS__)
#define ushort4(...) emu::make<ushort4>(__VA_ARGS__)
#define uint2(...) emu::make<uint2>(__VA_ARGS__)
#define uint3(...) emu::make<uint3>(__VA_ARGS__)
#define uint4(...) emu::make<uint4>(__VA_ARGS__)
#define ulong2(...) emu::make<ulong2>(__VA_ARGS__)
#define ulong3(...) emu::make<ulong3>(__VA_ARGS__)
#define ulong4(...) emu::make<ulong4>(__VA_ARGS__)

// The kernel that runs ignores address spaces; a pass of its own (-DEMU_ADDRESS_SPACES) only checks them.
#ifdef EMU_ADDRESS_SPACES
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif
#define thread
#define kernel
// Not in the language.
#pragma clang poison double throw try catch new delete goto dynamic_cast typeid

"""Device code that generated kernels call. It needs no header.

PTX instructions are those of the PTX ISA: cvt, max.NaN, cp.async, ldmatrix, mma.sync.
"""

__all__ = ["PORTABLE", "PRELUDE"]


PORTABLE = r"""template <class T> DEV T op_minimum(T a, T b) { return a < b ? a : b; }
template <class T> DEV T op_maximum(T a, T b) { return a > b ? a : b; }
template <class T> DEV T op_floordiv(T a, T b) {
  T q = a / b; return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q; }
template <class T> DEV T op_mod(T a, T b) {
  T r = a % b; return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r; }
DEV u32 op_floordiv(u32 a, u32 b) { return a / b; }
DEV u32 op_mod(u32 a, u32 b) { return a % b; }
DEV u8 op_floordiv(u8 a, u8 b) { return a / b; }
DEV u8 op_mod(u8 a, u8 b) { return a % b; }"""
"""The part that is plain C++, for any compiler."""

PRELUDE = (
    r"""
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
struct bf16 { u16 x; };
struct f16 { u16 x; };
struct __align__(16) vec16 { u32 w[4]; };
struct __align__(8) vec8 { u32 w[2]; };
#define DEV static __device__ __forceinline__

DEV float f32_of(float v) { return v; }
DEV float f32_of(bf16 v) { return __uint_as_float((u32)v.x << 16); }
DEV float f32_of(f16 v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v.x)); return r; }
template <class T> struct to;
template <> struct to<float> { DEV float from(float v) { return v; } };
template <> struct to<bf16> { DEV bf16 from(float v) {
  bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.x) : "f"(v)); return r; } };
template <> struct to<f16> { DEV f16 from(float v) {
  f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.x) : "f"(v)); return r; } };
DEV u32 pack(bf16 a, bf16 b) { return (u32)a.x | ((u32)b.x << 16); }
DEV u32 pack(f16 a, f16 b) { return (u32)a.x | ((u32)b.x << 16); }

DEV float quotient(float a, float b) {
  float r; asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float op_minimum(float a, float b) {
  float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEV float op_maximum(float a, float b) {
  float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
"""
    + PORTABLE
    + r"""
template <class T> DEV T shuffle_xor(T v, int mask) { return __shfl_xor_sync(~0u, v, mask); }

// Programmatic dependent launch. What earlier grids use is theirs until wait_for_earlier_grids,
// which every thread calls: a grid that is complete is behind all that it came after.
#if __CUDA_ARCH__ >= 900
DEV void later_grids_may_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV void wait_for_earlier_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A pointer of which nothing is known but that it is to the device's memory: what is loaded through
// it stays behind the wait.
template <class T> DEV void behind(T*& p) {
  size_t a = __cvta_generic_to_global(p);
  asm volatile("" : "+l"(a));
  p = (T*)__cvta_global_to_generic(a); }
// An element of a Ref, where a kernel stores nothing: the compiler may move it past stores.
template <class T> DEV T load(const T* p) {
  union { u64 w; u32 h; u16 q; T v; } u;
  if constexpr (sizeof(T) == 8) asm("ld.global.u64 %0, [%1];" : "=l"(u.w) : "l"(p));
  else if constexpr (sizeof(T) == 4) asm("ld.global.u32 %0, [%1];" : "=r"(u.h) : "l"(p));
  else if constexpr (sizeof(T) == 2) asm("ld.global.u16 %0, [%1];" : "=h"(u.q) : "l"(p));
  else asm("ld.global.u8 %0, [%1];" : "=h"(u.q) : "l"(p));
  return u.v; }
// Has the second-level cache bring bytes that are read soon: whole times 16, from where 16 begin.
DEV void bring_soon(const void* p, u32 n) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(n)); }
// ptxas moves ld.global.nc above the wait.
#define ONLY_READ ""
#define RESTRICT
#else
template <class T> DEV T load(const T* p) { return *p; }
DEV void later_grids_may_start() {}
DEV void wait_for_earlier_grids() {}
template <class T> DEV void behind(const T&) {}
DEV void bring_soon(const void*, u32) {}
#define ONLY_READ ".nc"
#define RESTRICT __restrict__
#endif

// Tiles of a Ref, where a kernel stores nothing. "stream" is read once (weights) and should not
// displace what L1 holds.
DEV vec16 load16(const void* p) {
  vec16 v; asm("ld.global" ONLY_READ ".v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p)); return v; }
DEV vec16 load16_stream(const void* p) {
  vec16 v; asm("ld.global" ONLY_READ ".L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(p)); return v; }
// Weights that are read before the wait, zeros where not `ok`. A weak load would be moved below it.
DEV vec16 load16_early(const void* p, bool ok) {
  vec16 v = {}; asm volatile("{ .reg .pred q; setp.ne.u32 q, %5, 0;\n\t"
    "@q ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
    : "+r"(v.w[0]), "+r"(v.w[1]), "+r"(v.w[2]), "+r"(v.w[3]) : "l"(p), "r"((u32)ok)); return v; }
// The same where `ok`, otherwise `v`.
DEV vec16 load16(const void* p, bool ok, vec16 v) {
  asm("{ .reg .pred q; setp.ne.u32 q, %5, 0;\n\t"
    "@q ld.global" ONLY_READ ".v4.u32 {%0,%1,%2,%3}, [%4]; }"
    : "+r"(v.w[0]), "+r"(v.w[1]), "+r"(v.w[2]), "+r"(v.w[3]) : "l"(p), "r"((u32)ok)); return v; }
// One store, where what is stored as it was loaded becomes four of 4 bytes else.
DEV void store16(void* p, vec16 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};"
    :: "l"(p), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory"); }

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void copy_async16(u32 dst, const void* src, bool valid) {
  int n = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
    :: "r"(dst), "l"(src), "r"(n) : "memory"); }
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
DEV void ldmatrix4(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }
DEV void ldmatrix4_t(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory"); }
DEV void mma_step(float* c, const u32* a, u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
DEV void mma_step(float* c, const u32* a, u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)); }
"""
)

"""Device code that few kernels call, added to the text of those that do.

PTX instructions are those of the PTX ISA: cvt with satfinite (8-bit floats, sm_89 on), cvt.rzi.
"""

__all__ = ["HELPERS", "with_needed"]

# Order: a helper may use those before it.
HELPERS: dict[str, str] = {
    "fault": r"""
// The first failing check, for the host; the layout is that of tilert/fault.py.
struct fault_record { u32 state; int kernel, site, program, grid[32]; i64 index, extent; };
struct fault_place { fault_record* to; int kernel, grid[32]; };
static __device__ __noinline__ void fault_note(
    const fault_place& at, int site, int program, i64 index, i64 extent) {
  fault_record* const to = at.to;
  if (*(volatile u32*)&to->state || atomicCAS(&to->state, 0u, 1u)) return;
  to->kernel = at.kernel; to->site = site; to->program = program;
  for (int i = 0; i < 32; ++i) to->grid[i] = at.grid[i];
  to->index = index; to->extent = extent;
  __threadfence_system();
  *(volatile u32*)&to->state = 2u;
}
DEV bool fault_sure(i64 index, i64 extent, const fault_place& at, int site, int program) {
  if ((u64)index < (u64)extent) return true;
  fault_note(at, site, program, index, extent);
  return false;
}
""",
    "i8": r"""
typedef signed char i8;
""",
    "f8": r"""
struct f8e4m3 { u8 x; };
struct f8e5m2 { u8 x; };
// To M mantissa bits and bias B, to nearest even; what is beyond the largest becomes the largest.
template <int M, int B> DEV u32 narrow(float v, float largest, float least, float unit) {
  const u32 sign = __float_as_uint(v) >> 24 & 0x80u;
  float a = fabsf(v);
  if (a != a) return sign | 0x7fu;
  a = a < largest ? a : largest;
  if (a < least) return sign | (u32)rintf(a * unit);
  u32 t = __float_as_uint(a);
  t += (t >> (23 - M) & 1u) + ((1u << (22 - M)) - 1u);
  return sign | ((t >> (23 - M)) - ((127u - B) << M));
}
template <> struct to<f8e4m3> { DEV f8e4m3 from(float v) {
#if __CUDA_ARCH__ >= 890
  u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return f8e4m3{(u8)r};
#else
  return f8e4m3{(u8)narrow<3, 7>(v, 448.0f, 0.015625f, 512.0f)};
#endif
} };
template <> struct to<f8e5m2> { DEV f8e5m2 from(float v) {
#if __CUDA_ARCH__ >= 890
  u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return f8e5m2{(u8)r};
#else
  return f8e5m2{(u8)narrow<2, 15>(v, 57344.0f, 6.103515625e-05f, 65536.0f)};
#endif
} };
// An e5m2 is the upper half of an f16. An e4m3 has its exponent and mantissa where an f32 has the
// low end of its own: scaled, subnormal numbers are right as well.
DEV float f32_of(f8e5m2 v) { return f32_of(f16{(u16)(v.x << 8)}); }
DEV float f32_of(f8e4m3 v) {
  const u32 m = v.x & 0x7fu;
  const float a = m == 0x7fu ? __uint_as_float(0x7fc00000u)
                             : __uint_as_float(m << 20) * 1.329227995784916e+36f;
  return __uint_as_float(__float_as_uint(a) | (u32)(v.x & 0x80u) << 24); }
""",
    "cut": r"""
// A float toward 0: the nearest that the type has, 0 for NaN.
template <class T> struct cut;
template <> struct cut<int> { DEV int from(float v) {
  int r; asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(r) : "f"(v)); return r; } };
template <> struct cut<u32> { DEV u32 from(float v) {
  u32 r; asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(r) : "f"(v)); return r; } };
template <> struct cut<i64> { DEV i64 from(float v) {
  i64 r; asm("cvt.rzi.s64.f32 %0, %1;" : "=l"(r) : "f"(v)); return v == v ? r : 0; } };
template <> struct cut<u8> { DEV u8 from(float v) {
  const u32 r = cut<u32>::from(v); return (u8)(r < 255u ? r : 255u); } };
template <> struct cut<signed char> { DEV signed char from(float v) {
  const int r = cut<int>::from(v); return (signed char)(r < -128 ? -128 : r > 127 ? 127 : r); } };
""",
    "philox": r"""
struct words4 { u32 w[4]; };
// Philox 4x32-10 (Salmon et al., 2011), the high half of the counter 0.
DEV words4 philox(u32 k0, u32 k1, u32 c0, u32 c1) {
  u32 a = c0, b = c1, c = 0, d = 0;
#pragma unroll
  for (int turn = 0; turn < 10; ++turn) {
    if (turn) { k0 += 0x9E3779B9u; k1 += 0xBB67AE85u; }
    const u32 h1 = __umulhi(0xD2511F53u, a), l1 = 0xD2511F53u * a;
    const u32 h2 = __umulhi(0xCD9E8D57u, c), l2 = 0xCD9E8D57u * c;
    a = h2 ^ b ^ k0; c = h1 ^ d ^ k1; b = l2; d = l1;
  }
  return words4{{a, b, c, d}};
}
""",
    "rsqrt": r"""
// Half an ulp off, where the instruction alone is two: one more step of Newton's method, in which
// the product x r is known to twice the digits. It gives NaN where r is 0 or infinite.
DEV float op_rsqrt(float x) {
  const float r = rsqrtf(x), high = x * r, low = fmaf(x, r, -high);
  const float rest = fmaf(-low, r, fmaf(-high, r, 1.0f));
  return rest == rest ? fmaf(0.5f * r, rest, r) : r; }
""",
    "triple": r"""
// a b c rounded once, not twice. Where that overflows on the way it is no number.
DEV float product_of_three(float a, float b, float c) {
  const float p = a * b, twice = p * c, once = fmaf(p, c, fmaf(a, b, -p) * c);
  return once == once ? once : twice; }
""",
    "normal": r"""
// (((c0 x + c1) x + c2) x + c3) x, every step rounded on its own.
DEV float series(float c0, float c1, float c2, float c3, float x) {
  float t = __fmul_rn(c0, x);
  t = __fmul_rn(__fadd_rn(t, c1), x);
  t = __fmul_rn(__fadd_rn(t, c2), x);
  return __fmul_rn(__fadd_rn(t, c3), x);
}
// Box and Muller (1958), step by step what the cpu backend does, so that the bits are the same.
DEV float normal(u32 k0, u32 k1, u32 c0, u32 c1) {
  const words4 x = philox(k0, k1, c0, c1);
  const float u = __fmul_rn((float)(x.w[0] < 1u ? 1u : x.w[0]), 2.3283064365386963e-10f);
  const int bits = __float_as_int(u);
  const int power = (bits - 0x3F3504F3) >> 23;
  const float m = __int_as_float(bits - power * 8388608);
  const float s = __fdiv_rn(__fadd_rn(m, -1.0f), __fadd_rn(m, 1.0f));
  const float twice = __fadd_rn(s, s);
  const float rest = __fmul_rn(twice, series(0.1111111111111111f, 0.14285714285714285f, 0.2f,
                                             0.3333333333333333f, __fmul_rn(s, s)));
  const float low = __fadd_rn(__fmul_rn((float)power, -0.00021219444005471377f),
                              __fadd_rn(twice, rest));
  const float log = __fadd_rn(__fmul_rn((float)power, 0.693359375f), low);
  const float radius = __fsqrt_rn(__fadd_rn(0.0f, -__fadd_rn(log, log)));
  const int turn = (int)(x.w[1] >> 8), quarter = (turn + 2097152) >> 22;
  const float t = __fmul_rn((float)(turn - quarter * 4194304), 3.7450702829239286e-07f);
  const float t2 = __fmul_rn(t, t);
  const float sine = __fadd_rn(t, __fmul_rn(t, series(
    2.7557319223985893e-06f, -0.0001984126984126984f, 0.008333333333333333f,
    -0.16666666666666666f, t2)));
  const float cosine = __fadd_rn(1.0f, series(
    2.48015873015873e-05f, -0.001388888888888889f, 0.041666666666666664f, -0.5f, t2));
  const float value = quarter & 1 ? sine : cosine;
  return __fmul_rn(radius, (quarter + 1) & 2 ? -value : value);
}
""",
}
_NEEDS = {"normal": ("philox",)}


def with_needed(names: set[str]) -> list[str]:
    """The texts of helpers and of those that they use, in order."""
    wanted = names.union(*(_NEEDS.get(n, ()) for n in names))
    return [text for name, text in HELPERS.items() if name in wanted]

// The part of a GPU that kernels see: its words for memory and functions, and its instructions.
// `emulated/emulator.h` has the same for a processor. No other source knows which of them it has.
#ifndef EMULATED

template <class T> using In = const T *__restrict__;
template <class T> using Out = T *__restrict__;
template <class T> using Shared = T *;
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define SHARED(type, name, len) __shared__ type name[len]
// Dynamic shared memory of the launch, aligned to vectors.
#define LAUNCHED(name, len) extern __shared__ __align__(16) float name[]
#define KERNEL(name, threads, parameters, ...) \
    extern "C" __global__ void __launch_bounds__(threads) name parameters { __VA_ARGS__; }

// Shared memory from a float on, as elements of type T.
template <class T = float> DEVICE Shared<T> part_of(Shared<float> memory, int first) {
    return reinterpret_cast<T *>(memory + first);
}

// ---- Vectors V of 8 or 16 bytes, at addresses that are multiples of their size.

template <class V> DEVICE V load_as(const auto *x, long long at) { return *reinterpret_cast<const V *>(x + at); }

template <class V> DEVICE void store_as(auto *y, long long at, V vector) { *reinterpret_cast<V *>(y + at) = vector; }

// To global memory, by one instruction: where a part of the vector is known earlier than the rest,
// the compiler may split `store_as`.
DEVICE void store_at_once(auto *y, long long at, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y + at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

DEVICE void store_at_once(auto *y, long long at, uint2 v) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(y + at), "r"(v.x), "r"(v.y) : "memory");
}

// ---- Numbers.

// Two floats as bf16, rounded to nearest, ties to even; `low` becomes the lower half of the word.
DEVICE unsigned two_bf16(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// log2(x) within 2^-22 max(1, |log2(x)|) for normal x > 0, and 2^x within 2^-22 2^x. Both keep NaN.
// Subnormal operands and results are zeros.
DEVICE float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Asynchronous copies of eight bf16s to shared memory.

DEVICE unsigned shared_address(const void *at) { return (unsigned)__cvta_generic_to_shared(at); }

// Starts a copy; zeros if not `there`. See `await_copies`.
template <class T> DEVICE void copy_later(T *to, int at, const T *from, long long first, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to + at)), "l"(from + (there ? first : 0)),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// Copies since the last call become one group.
DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT groups of this thread are unfinished.
template <int LEFT> DEVICE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// ---- Products of bf16 by a warp. A lane has, with g = lane / 4 and q = lane % 4: of a matrix of
// 8 x 8, elements 2q and 2q + 1 of row g; of a sum of 16 x 8, those of row g, then those of row
// g + 8.

// Four matrices; lane 8 i + r has the start of row r of matrix i.
template <bool TURNED> DEVICE void load_matrices(unsigned (&m)[4], const auto *memory, int at) {
    if (TURNED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(memory + at))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(shared_address(memory + at))
                     : "memory");
    }
}

// sum += a b. a: 16 x 16 as matrices (upper, lower), first its left half, then its right one; b: 16
// x 8 as two matrices.
DEVICE void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

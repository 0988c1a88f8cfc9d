// Emulates the CUDA side of a kernel on a processor: the same source, thread by thread, after this
// in the place of `device.cuh`, which says what its functions do.
//
// Each thread of a block is a fiber, and blocks run one after another. A fiber runs until it ends
// or waits: for its block at a barrier, for its warp at a shuffle. Every memory access is checked
// against its operand, shared memory starts as NaNs, and a warp runs as far ahead of the others as
// barriers allow. Threads, warps and blocks can run in reverse order: if that changes the result,
// the kernel has a race.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#define EMULATED
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define __launch_bounds__(threads)

namespace emulator {

struct Index {
    unsigned x, y, z;
};

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Fiber {
    void *stack_pointer;
    State state;
    // Values for the other threads of its warp. Two places alternate, so that a fast thread does
    // not overwrite what a slow one has not read.
    char given[2][32];
    int turn;
};

// An unfinished copy to shared memory; zeros if there is no source.
struct Copy {
    void *to;
    const void *from;
    size_t bytes;
    unsigned group;
};

// Unfinished copies of a thread.
struct Copies {
    std::vector<Copy> pending;
    unsigned group;
};

const unsigned MOST_THREADS = 1024;
const size_t STACK = 128 << 10;

struct SharedArray {
    const void *site;
    char *start;
    size_t bytes;
};

struct Block {
    Fiber fibers[MOST_THREADS];
    Copies copies[MOST_THREADS];
    void *scheduler;
    char *stacks;
    Fiber *now;
    std::vector<SharedArray> shared;
    size_t shared_bytes, most_shared_bytes;
    char message[256];
    bool failed, backwards;
    void (*body)(void *);
    void *argument;
};

static Block block;
static Index thread_index, block_index, block_size, grid_size;

extern "C" void emulator_switch(void **from, void *to);

__asm__(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void wait(State state) {
    Index mine = thread_index;
    block.now->state = state;
    emulator_switch(&block.now->stack_pointer, block.scheduler);
    thread_index = mine;
}

[[noreturn]] static void fail(const char *what, unsigned long long at, unsigned long long of) {
    if (!block.failed) {
        block.failed = true;
        snprintf(block.message, sizeof block.message, "%s: %llu of %llu (block %u %u, thread %u)", what, at, of,
                 block_index.x, block_index.y, thread_index.x);
    }
    wait(DONE);
    abort();
}

// The copies of this thread. A group arrives at its wait or, if threads run backwards, at once: the
// latest and the earliest that any device does.
static Copies &copies() { return block.copies[thread_index.x]; }

static void arrive(const Copy &copy) {
    if (copy.from) {
        memcpy(copy.to, copy.from, copy.bytes);
    } else {
        memset(copy.to, 0, copy.bytes);
    }
}

static void copy_later(void *to, const void *from, size_t bytes) {
    Copy copy = {to, from, bytes, copies().group};
    if (block.backwards) {
        arrive(copy);
    } else {
        copies().pending.push_back(copy);
    }
}

static void close_group() { ++copies().group; }

// Waits until at most LEFT of the closed groups are unfinished.
template <unsigned LEFT> void await_copies() {
    std::vector<Copy> later;
    for (const Copy &copy : copies().pending) {
        if (copy.group + LEFT < copies().group) {
            arrive(copy);
        } else {
            later.push_back(copy);
        }
    }
    copies().pending = later;
}

static void enter() {
    block.body(block.argument);
    if (!copies().pending.empty()) {
        fail("copies without a wait", copies().pending.size(), 0);
    }
    wait(DONE);
    abort();
}

static void prepare(Fiber &fiber, char *stack) {
    void **top = (void **)(stack + STACK);
    // As after a call of `enter`: the stack is 8 past a multiple of 16 there.
    *--top = nullptr;
    *--top = (void *)enter;
    for (int saved = 0; saved < 6; ++saved) {
        *--top = nullptr;
    }
    fiber.stack_pointer = top;
    fiber.state = READY;
    fiber.turn = 0;
}

// Runs each thread of a warp to its next wait, and releases a warp that waits for itself; false if
// nothing moved.
static bool run_warp(unsigned first, unsigned lanes, bool backwards, unsigned &done) {
    bool moved = false, all = true;
    for (unsigned turn = 0; turn < lanes && !block.failed; ++turn) {
        unsigned thread = first + (backwards ? lanes - 1 - turn : turn);
        Fiber &fiber = block.fibers[thread];
        if (fiber.state == READY) {
            moved = true;
            thread_index = {thread, 0, 0};
            block.now = &fiber;
            emulator_switch(&block.scheduler, fiber.stack_pointer);
            done += fiber.state == DONE;
        }
        all = all && fiber.state == AT_WARP;
    }
    for (unsigned lane = 0; all && lane < lanes; ++lane) {
        block.fibers[first + lane].state = READY;
    }
    return moved && !block.failed;
}

// Runs the threads of one block. A warp runs as far as possible before the next one does, in either
// order, so only barriers order memory accesses between warps.
static void run_block(unsigned threads, bool backwards) {
    block.shared.clear();
    block.shared_bytes = 0;
    block.backwards = backwards;
    for (unsigned thread = 0; thread < threads; ++thread) {
        block.copies[thread] = {};
        prepare(block.fibers[thread], block.stacks + thread * STACK);
    }
    unsigned done = 0;
    const unsigned warps = (threads + 31) / 32;
    while (done < threads && !block.failed) {
        bool moved = false;
        for (unsigned turn = 0; turn < warps; ++turn) {
            unsigned first = 32 * (backwards ? warps - 1 - turn : turn);
            unsigned lanes = threads - first < 32 ? threads - first : 32;
            while (run_warp(first, lanes, backwards, done)) {
                moved = true;
            }
        }
        if (!moved && !block.failed) {
            bool all = true;
            for (unsigned thread = 0; thread < threads; ++thread) {
                all = all && block.fibers[thread].state == AT_BLOCK;
            }
            if (!all) {
                // Some threads have ended or wait for something else; a device would hang.
                block.failed = true;
                snprintf(block.message, sizeof block.message, "threads wait for each other in block %u %u",
                         block_index.x, block_index.y);
            }
            for (unsigned thread = 0; thread < threads; ++thread) {
                block.fibers[thread].state = READY;
            }
        }
    }
    for (SharedArray &array : block.shared) {
        free(array.start);
    }
}

// Memory of one operand; every access is checked and counted.
template <class T> struct Checked {
    T *start;
    unsigned long long len;
    unsigned long long *accesses;

    T &operator[](long long at) const {
        ++*accesses;
        if (at < 0 || (unsigned long long)at >= len) {
            fail("element", (unsigned long long)at, len);
        }
        return start[at];
    }

    // The elements of a vector, which must start at a multiple of its size.
    T *vector(long long at, size_t bytes) const {
        for (size_t k = 0; k < bytes / sizeof(T); ++k) {
            (*this)[at + k];
        }
        if ((uintptr_t)(start + at) % bytes != 0) {
            fail("a misaligned vector", (uintptr_t)(start + at) % bytes, bytes);
        }
        return start + at;
    }

    operator Checked<const T>() const { return {start, len, accesses}; }
};

static unsigned long long shared_accesses;

// The array of a `SHARED` line, common to all threads of a block.
template <class T> Checked<T> shared(const void *site, size_t len) {
    for (SharedArray &array : block.shared) {
        if (array.site == site) {
            return {(T *)array.start, len, &shared_accesses};
        }
    }
    size_t bytes = len * sizeof(T);
    char *start = (char *)malloc(bytes);
    memset(start, 0xff, bytes);
    block.shared.push_back({site, start, bytes});
    block.shared_bytes += bytes;
    block.most_shared_bytes = block.shared_bytes > block.most_shared_bytes ? block.shared_bytes : block.most_shared_bytes;
    return {(T *)start, len, &shared_accesses};
}

// Values that the threads of a warp exchange. All threads must take part.
template <class T> struct Shown {
    int turn;

    T of(unsigned lane) const {
        T theirs;
        memcpy(&theirs, block.fibers[thread_index.x / 32 * 32 + lane].given[turn], sizeof theirs);
        return theirs;
    }
};

template <class T> Shown<T> show(T mine) {
    static_assert(sizeof(T) <= sizeof(Fiber::given[0]), "room for it");
    Fiber &fiber = *block.now;
    int turn = fiber.turn;
    fiber.turn ^= 1;
    memcpy(fiber.given[turn], &mine, sizeof mine);
    wait(AT_WARP);
    return {turn};
}

} // namespace emulator

template <class T> using In = emulator::Checked<const T>;
template <class T> using Out = emulator::Checked<T>;
template <class T> using Shared = emulator::Checked<T>;

template <class T = float> Shared<T> part_of(Shared<float> memory, int first) {
    if (first < 0 || (unsigned long long)first > memory.len) {
        emulator::fail("part of shared memory", (unsigned long long)first, memory.len);
    }
    return {(T *)(memory.start + first), (memory.len - first) * sizeof(float) / sizeof(T), memory.accesses};
}

#define SHARED(type, name, len) \
    static const char name##_site = 0; \
    Shared<type> name = emulator::shared<type>(&name##_site, len)

#define LAUNCHED(name, len) SHARED(float, name, len)

#define __expf expf
#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

static inline void __syncthreads() { emulator::wait(emulator::AT_BLOCK); }

template <class T> T __shfl_xor_sync(unsigned, T x, unsigned lanes) {
    return emulator::show(x).of((threadIdx.x % 32) ^ lanes);
}

template <class T> T __shfl_sync(unsigned, T x, unsigned lane) { return emulator::show(x).of(lane); }

static inline int __syncthreads_or(int mine) {
    // All calls share one array, so no thread may start the next call before all have read.
    SHARED(int, any, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        any[0] = 0;
    }
    __syncthreads();
    if (mine) {
        any[0] = 1;
    }
    __syncthreads();
    int all = any[0];
    __syncthreads();
    return all;
}

static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

template <class To, class From> static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
static inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float fast_log2(float x) { return log2f(x); }
static inline float fast_exp2(float x) { return exp2f(x); }

static inline unsigned one_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) {
        return bits >> 16 | 0x40u;
    }
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

static inline unsigned two_bf16(float low, float high) { return one_bf16(low) | one_bf16(high) << 16; }

struct uint2 {
    unsigned x, y;
};

struct uint4 {
    unsigned x, y, z, w;
};

struct float4 {
    float x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class V, class T> V load_as(emulator::Checked<T> x, long long at) {
    V vector;
    memcpy(&vector, x.vector(at, sizeof vector), sizeof vector);
    return vector;
}

template <class V, class T> void store_as(emulator::Checked<T> y, long long at, V vector) {
    memcpy(y.vector(at, sizeof vector), &vector, sizeof vector);
}

template <class V, class T> void store_at_once(emulator::Checked<T> y, long long at, V vector) { store_as(y, at, vector); }

using emulator::await_copies;
using emulator::close_group;

template <class T> void copy_later(Shared<T> to, int at, In<T> from, long long first, bool there) {
    emulator::copy_later(to.vector(at, 16), there ? from.vector(first, 16) : nullptr, 16);
}

template <bool TURNED, class T> void load_matrices(unsigned (&m)[4], Shared<T> memory, int at) {
    memory.vector(at, 16);
    auto starts = emulator::show(at);
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) {
        unsigned both[2];
        for (int k = 0; k < 2; ++k) {
            int row = TURNED ? 2 * q + k : g, column = TURNED ? g : 2 * q + k;
            both[k] = memory[starts.of(8 * i + row) + column].bits;
        }
        m[i] = both[0] | both[1] << 16;
    }
}

struct Factors {
    unsigned a[4], b[2];
};

static inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    auto factors = emulator::show(Factors{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    auto half = [](unsigned both, int k) { return __uint_as_float(k == 0 ? both << 16 : both & 0xffff0000u); };
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    for (int at = 0; at < 4; ++at) {
        int lower = at / 2, column = 2 * q + at % 2;
        // More exact than a device, which sums in f32 in an unspecified order.
        double total = sum[at];
        for (int k = 0; k < 16; ++k) {
            const int side = k / 8, owner = k % 8 / 2;
            float left = half(factors.of(4 * g + owner).a[lower + 2 * side], k % 2);
            float right = half(factors.of(4 * column + owner).b[side], k % 2);
            total += (double)left * right;
        }
        sum[at] = (float)total;
    }
}

// Operands as the host passes them: start, and length in elements.
struct Span {
    void *start;
    unsigned long long len;
    // Counter of elements read and written.
    unsigned long long *accesses;
};

template <class T> T from_span(Span span) { return {(decltype(T::start))span.start, span.len, span.accesses}; }
// A word in the place of a length.
template <> unsigned from_span<unsigned>(Span span) { return (unsigned)span.len; }

template <class... Parameters, size_t... AT>
static void call(void (*kernel)(Parameters...), const Span *spans, std::index_sequence<AT...>) {
    kernel(from_span<Parameters>(spans[AT])...);
}

template <class... Parameters>
static const char *launch(void (*kernel)(Parameters...), const Span *spans, unsigned blocks_x, unsigned blocks_y,
                          unsigned threads, int backwards, unsigned long long *shared_bytes) {
    using namespace emulator;
    struct Argument {
        void (*kernel)(Parameters...);
        const Span *spans;
    } argument = {kernel, spans};
    block.body = [](void *given) {
        Argument &argument = *(Argument *)given;
        call(argument.kernel, argument.spans, std::index_sequence_for<Parameters...>());
    };
    block.argument = &argument;
    block.failed = false;
    block.most_shared_bytes = 0;
    if (!block.stacks) {
        block.stacks = (char *)malloc(MOST_THREADS * STACK);
    }
    block_size = {threads, 1, 1};
    grid_size = {blocks_x, blocks_y, 1};
    unsigned long long blocks = (unsigned long long)blocks_x * blocks_y;
    for (unsigned long long turn = 0; turn < blocks && !block.failed; ++turn) {
        unsigned long long number = backwards ? blocks - 1 - turn : turn;
        block_index = {(unsigned)(number % blocks_x), (unsigned)(number / blocks_x), 0};
        run_block(threads, backwards);
    }
    *shared_bytes = block.most_shared_bytes;
    return block.failed ? block.message : nullptr;
}

#define KERNEL(name, threads, parameters, ...)                                                                        \
    static void name##_body parameters { __VA_ARGS__; }                                                               \
    extern "C" const char *name(const Span *spans, unsigned blocks_x, unsigned blocks_y, int backwards,               \
                                unsigned long long *shared_bytes) {                                                   \
        return launch(name##_body, spans, blocks_x, blocks_y, threads, backwards, shared_bytes);                      \
    }

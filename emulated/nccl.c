// Emulates NCCL beside the emulated GPU, whose memory is the host's: processes or threads of one
// machine exchange numbers through mapped memory. Calls finish their work before they return.
//
// With $STAND_IN_NCCL, it gives a `wrong` sum to the second rank, `refuse`s to join, or lets ranks `wait` to join.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };
enum { F32 = 7, SUM = 0 };
enum { RANKS = 8, RING = 1 << 16, MOST_CALLS = 1 << 16 };
enum { AWAY, HERE, LEFT, ABORTED };

typedef struct {
    char name[128];
} Id;

typedef struct {
    size_t bytes;
    unsigned magic, version;
    int blocking;
} Config;

// Data from one rank to another: bytes written and read so far, and those in between.
typedef struct {
    uint64_t written, read;
    unsigned char ring[RING];
} Way;

typedef struct {
    int state[RANKS], process[RANKS];
    Way ways[RANKS][RANKS];
} Meeting;

typedef struct {
    Meeting *meeting;
    char name[128];
    int rank, ranks, error;
} Comm;

// One half of a message. An all-reduce is split into messages, followed by an addition.
typedef struct {
    Comm *comm;
    unsigned char *at;
    size_t bytes;
    int sends, peer;
} Call;

typedef struct {
    Comm *comm;
    float *to, *parts;
    size_t count;
} Addition;

static _Thread_local int depth;
static _Thread_local Call *calls;
static _Thread_local Addition *additions;
static _Thread_local size_t call_count, addition_count;
static char last_error[256];

static int told(const char *what) {
    const char *text = getenv("STAND_IN_NCCL");
    return text && !strcmp(text, what);
}

static void nap(void) {
    struct timespec a_while = {0, 50000};
    nanosleep(&a_while, 0);
}

static int load(int *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }

int ncclGetVersion(int *version) {
    *version = 1;
    return SUCCESS;
}

int ncclGetUniqueId(Id *id) {
    static int made;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(id, 0, sizeof *id);
    snprintf(id->name, sizeof id->name, "/spd-nccl-%d-%d-%ld", (int)getpid(), __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST),
             now.tv_nsec);
    return SUCCESS;
}

int ncclCommInitRankConfig(void **made, int ranks, Id id, int rank, Config *config) {
    int right = config && config->bytes == sizeof *config && config->magic == 0xcafebeef && config->version == 21400;
    if (!right || config->blocking || ranks > RANKS || rank < 0 || rank >= ranks) {
        return INVALID_ARGUMENT;
    }
    if (told("refuse")) {
        snprintf(last_error, sizeof last_error, "Duplicate GPU detected\n");
        return INVALID_USAGE;
    }
    int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Meeting))) {
        return SYSTEM_ERROR;
    }
    Comm *comm = calloc(1, sizeof *comm);
    comm->meeting = mmap(0, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    memcpy(comm->name, id.name, sizeof comm->name);
    comm->rank = rank;
    comm->ranks = ranks;
    comm->meeting->process[rank] = getpid();
    __atomic_store_n(&comm->meeting->state[rank], HERE, __ATOMIC_RELEASE);
    *made = comm;
    return IN_PROGRESS;
}

static int has_gone(Comm *comm, int peer) {
    int state = load(&comm->meeting->state[peer]);
    int process = comm->meeting->process[peer];
    return state >= LEFT || (state == HERE && kill(process, 0) && errno == ESRCH);
}

int ncclCommGetAsyncError(Comm *comm, int *error) {
    *error = load(&comm->error);
    for (int rank = 0; rank < comm->ranks && !*error; ++rank) {
        if (load(&comm->meeting->state[rank]) == AWAY || told("wait")) {
            *error = IN_PROGRESS;
        }
    }
    if (*error != IN_PROGRESS) {
        // All ranks have opened it.
        shm_unlink(comm->name);
    }
    return SUCCESS;
}

static int gone(Comm *comm, int how) {
    __atomic_store_n(&comm->meeting->state[comm->rank], how, __ATOMIC_RELEASE);
    shm_unlink(comm->name);
    return SUCCESS;
}

int ncclCommFinalize(Comm *comm) {
    (void)comm;
    return SUCCESS;
}

// A rank that still sends may read it, so it is kept.
int ncclCommDestroy(Comm *comm) { return gone(comm, LEFT); }

int ncclCommAbort(Comm *comm) {
    __atomic_store_n(&comm->error, REMOTE_ERROR, __ATOMIC_RELEASE);
    return gone(comm, ABORTED);
}

// Moves some bytes of a call, if possible.
static size_t move(Call *call) {
    Meeting *meeting = call->comm->meeting;
    int own = call->comm->rank;
    Way *way = call->sends ? &meeting->ways[own][call->peer] : &meeting->ways[call->peer][own];
    uint64_t written = __atomic_load_n(&way->written, __ATOMIC_ACQUIRE), read = __atomic_load_n(&way->read, __ATOMIC_ACQUIRE);
    size_t first = (call->sends ? written : read) % RING;
    size_t most = call->sends ? RING - (written - read) : written - read;
    size_t bytes = call->bytes < most ? call->bytes : most;
    bytes = bytes < RING - first ? bytes : RING - first;
    if (call->sends) {
        memcpy(way->ring + first, call->at, bytes);
        __atomic_store_n(&way->written, written + bytes, __ATOMIC_RELEASE);
    } else {
        memcpy(call->at, way->ring + first, bytes);
        __atomic_store_n(&way->read, read + bytes, __ATOMIC_RELEASE);
    }
    call->at += bytes;
    call->bytes -= bytes;
    return bytes;
}

// Moves whatever can be moved, in the order of each way. Returns whether anything is left.
static int advance(size_t *moved) {
    int busy[2][RANKS] = {0}, left = 0;
    *moved = 0;
    for (size_t index = 0; index < call_count; ++index) {
        Call *call = &calls[index];
        int *is_busy = &busy[call->sends][call->peer];
        if (call->bytes && !*is_busy && !load(&call->comm->error)) {
            *moved += move(call);
            *is_busy = call->bytes > 0;
            left |= *is_busy;
        }
    }
    return left;
}

static void run(void) {
    size_t moved;
    for (unsigned idle = 0; advance(&moved); idle = moved ? 0 : idle + 1) {
        if (idle > 100) {
            for (size_t index = 0; index < call_count; ++index) {
                Call *call = &calls[index];
                if (!call->bytes || !has_gone(call->comm, call->peer)) {
                    continue;
                }
                // It may have sent the rest before it left.
                advance(&moved);
                if (!moved && call->bytes) {
                    snprintf(last_error, sizeof last_error, "rank %d has gone", call->peer);
                    __atomic_store_n(&call->comm->error, REMOTE_ERROR, __ATOMIC_RELEASE);
                }
                break;
            }
            nap();
        }
    }
    for (size_t index = 0; index < addition_count; ++index) {
        Addition *sum = &additions[index];
        for (size_t at = 0; at < sum->count; ++at) {
            // In order of ranks: the same bits as the tree for two ranks, but not for more.
            float total = sum->parts[at];
            for (int rank = 1; rank < sum->comm->ranks; ++rank) {
                total += sum->parts[rank * sum->count + at];
            }
            sum->to[at] = total;
        }
        if (told("wrong") && sum->comm->rank == 1) {
            sum->to[5] += 1;
        }
        free(sum->parts);
    }
    call_count = addition_count = 0;
}

int ncclGroupStart(void) {
    if (!calls) {
        calls = malloc(MOST_CALLS * sizeof *calls);
        additions = malloc(MOST_CALLS * sizeof *additions);
    }
    ++depth;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (!--depth) {
        run();
    }
    return SUCCESS;
}

static int message(Comm *comm, void *at, size_t count, int sends, int peer) {
    if (peer < 0 || peer >= comm->ranks || call_count == MOST_CALLS) {
        return INVALID_ARGUMENT;
    }
    ncclGroupStart();
    calls[call_count++] = (Call){comm, at, count * sizeof(float), sends, peer};
    return ncclGroupEnd();
}

int ncclSend(void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return type == F32 && !stream ? message(comm, from, count, 1, peer) : INVALID_ARGUMENT;
}

int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return type == F32 && !stream ? message(comm, to, count, 0, peer) : INVALID_ARGUMENT;
}

int ncclAllReduce(void *from, void *to, size_t count, int type, int op, Comm *comm, void *stream) {
    if (type != F32 || op != SUM || stream) {
        return INVALID_ARGUMENT;
    }
    ncclGroupStart();
    float *parts = malloc(comm->ranks * count * sizeof *parts + 1);
    additions[addition_count++] = (Addition){comm, to, parts, count};
    for (int peer = 0; peer < comm->ranks; ++peer) {
        message(comm, from, count, 1, peer);
        message(comm, parts + peer * count, count, 0, peer);
    }
    return ncclGroupEnd();
}

const char *ncclGetErrorString(int status) {
    switch (status) {
    case INVALID_USAGE:
        return "invalid usage";
    case REMOTE_ERROR:
        return "remote process exited or there was a network error";
    default:
        return "another error";
    }
}

const char *ncclGetLastError(void *comm) {
    (void)comm;
    return last_error;
}

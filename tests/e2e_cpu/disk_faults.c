/* A disk that is slow, stalls, fails or is full, for the real processes of a test: preloaded (LD_PRELOAD), it stands
   between them and what the page files of storage need of the C library. `disk_faults.py` builds it and gives orders.

   It acts on one folder, DISK_FAULTS_FOLDER: on names in it, and on descriptors that were opened by such a name. The
   orders lie in a file that everybody has mapped, DISK_FAULTS_ORDERS, so they change while the processes run. */

#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOOK_UPS = 1, READS = 2, CREATES = 4, WRITES = 8, RENAMES = 16 };
enum { STALL_POLL_US = 1000, MAX_FDS = 1 << 16 };

struct orders {
    _Atomic int32_t slow_us; /* that every call takes longer */
    _Atomic int32_t stalled; /* calls that are held until they are no more among these */
    _Atomic int32_t failing; /* calls that are answered with ... */
    _Atomic int32_t error;   /* ... this */
    _Atomic int64_t room;    /* bytes that may still be written; below 0: no bound */
    /* and what became of them: */
    _Atomic int32_t held;    /* calls that are being held */
    _Atomic int32_t slowed;  /* sum of those that took longer, or were held */
    _Atomic int32_t refused; /* sum of those that failed, for this or for want of room */
};

static struct orders *orders;
static const char *folder;
static _Atomic char is_ours[MAX_FDS];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("DISK_FAULTS_ORDERS");
    folder = getenv("DISK_FAULTS_FOLDER");
    int fd = path && folder ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof(struct orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED) orders = found;
    close(fd);
}

/* Whether a name, below a folder that is open as `dir`, lies in ours. */
static int is_below(int dir, const char *name) {
    struct stat one, other;
    if (!orders || name[0] == '/') return 0; /* storage names its files by the folder's descriptor only */
    return fstat(dir, &one) == 0 && stat(folder, &other) == 0 && one.st_ino == other.st_ino && one.st_dev == other.st_dev;
}

static int has_mark(int fd) { return orders && fd >= 0 && fd < MAX_FDS && is_ours[fd]; }

static int refuse(int error) {
    orders->refused++;
    errno = error;
    return -1;
}

/* What is ordered for such a call. Not 0: errno says why it fails. */
static int obey(int call) {
    int is_slow = orders->slow_us > 0, is_held = (orders->stalled & call) != 0;
    orders->slowed += is_slow || is_held;
    orders->held += is_held;
    if (is_slow) usleep(orders->slow_us);
    while (orders->stalled & call) usleep(STALL_POLL_US);
    int error = orders->failing & call ? orders->error : 0;
    orders->held -= is_held; /* last: whoever sees it may change the orders */
    return error ? refuse(error) : 0;
}

/* How much of a write there is room for, which is taken. */
static size_t take_room(size_t count) {
    int64_t room = orders->room, taken;
    do {
        if (room < 0) return count;
        taken = (int64_t)count < room ? (int64_t)count : room;
    } while (!atomic_compare_exchange_weak(&orders->room, &room, room - taken));
    return (size_t)taken;
}

/* The one of the C library. */
#define REAL(name) \
    ({ \
        static __typeof__(&name) real; \
        if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        real; \
    })

int openat64(int dir, const char *name, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    int below = is_below(dir, name);
    if (below && flags & O_CREAT && obey(CREATES)) return -1;
    int fd = REAL(openat64)(dir, name, flags, mode);
    if (fd >= 0 && fd < MAX_FDS) is_ours[fd] = below;
    return fd;
}

int close(int fd) {
    if (has_mark(fd)) is_ours[fd] = 0;
    return REAL(close)(fd);
}

int fstatat64(int dir, const char *name, struct stat64 *found, int flags) {
    return is_below(dir, name) && obey(LOOK_UPS) ? -1 : REAL(fstatat64)(dir, name, found, flags);
}

int renameat(int from, const char *old, int to, const char *new) {
    return is_below(to, new) && obey(RENAMES) ? -1 : REAL(renameat)(from, old, to, new);
}

ssize_t read(int fd, void *to, size_t count) {
    return has_mark(fd) && obey(READS) ? -1 : REAL(read)(fd, to, count);
}

ssize_t write(int fd, const void *from, size_t count) {
    if (!has_mark(fd)) return REAL(write)(fd, from, count);
    if (obey(WRITES)) return -1;
    size_t part = take_room(count);
    if (count && !part) return refuse(ENOSPC);
    return REAL(write)(fd, from, part);
}

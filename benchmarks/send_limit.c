/* Limit and count the bytes that send() passes to TCP sockets; see benchmarks/send_limit.py.
 *
 * SEND_LIMIT names a file of 16 bytes: the rate in bits per second as a double, 0 for no limit, and the count
 * as a 64-bit integer. All threads of a process share one token bucket. A nonblocking sender that finds it
 * empty gets EAGAIN, as from a full socket; a blocking one waits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct control {
  volatile double bits_per_second;
  volatile uint64_t sent;
};

typedef ssize_t (*send_function)(int, const void *, size_t, int);

static send_function next_send;
static struct control *control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double tokens, filled_at; /* bytes; seconds */

/* Smaller messages are control messages of NCCL and pass at once. Larger parts keep system calls few. */
static const size_t SMALL = 1 << 10, PART = 1 << 14;
static const double LEAST_BURST = 1 << 18, BURST_SECONDS = 1e-3;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

__attribute__((constructor)) static void open_control(void) {
  prctl(PR_SET_PDEATHSIG, SIGKILL); /* a rank that waits in a collective does not see its input end */
  next_send = (send_function)dlsym(RTLD_NEXT, "send");
  filled_at = seconds();
  const char *path = getenv("SEND_LIMIT");
  int file = path ? open(path, O_RDWR) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) control = mapped;
  close(file);
}

/* Take up to `wanted` bytes from the bucket; 0 if it has less than a part. */
static size_t take(size_t wanted) {
  double rate = control->bits_per_second / 8, now = seconds();
  double burst = rate * BURST_SECONDS > LEAST_BURST ? rate * BURST_SECONDS : LEAST_BURST;
  tokens += (now - filled_at) * rate;
  filled_at = now;
  if (tokens > burst) tokens = burst;
  size_t least = wanted < PART ? wanted : PART;
  if (tokens < least) return 0;
  size_t given = tokens < wanted ? (size_t)tokens : wanted;
  tokens -= given;
  return given;
}

static int is_tcp(int socket) {
  int kind = 0, family = 0;
  socklen_t size = sizeof kind;
  return !getsockopt(socket, SOL_SOCKET, SO_TYPE, &kind, &size) && kind == SOCK_STREAM &&
         !getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &family, &size) && (family == AF_INET || family == AF_INET6);
}

ssize_t send(int socket, const void *data, size_t size, int flags) {
  if (!control || !is_tcp(socket)) return next_send(socket, data, size, flags);
  size_t given = size;
  int limited = control->bits_per_second > 0 && size >= SMALL;
  while (limited) {
    pthread_mutex_lock(&lock);
    given = take(size);
    pthread_mutex_unlock(&lock);
    if (given) break;
    if (flags & MSG_DONTWAIT || fcntl(socket, F_GETFL) & O_NONBLOCK) {
      errno = EAGAIN;
      return -1;
    }
    usleep(100);
  }
  ssize_t sent = next_send(socket, data, given, flags);
  pthread_mutex_lock(&lock);
  if (sent > 0) control->sent += (uint64_t)sent;
  if (limited) tokens += given - (sent > 0 ? (double)sent : 0); /* the socket's buffer was full */
  pthread_mutex_unlock(&lock);
  return sent;
}

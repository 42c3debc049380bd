/* truthd: scripted OpenAI-compatible streams, and a log of what really happened.
 *
 * One thread and epoll. Every token has an absolute deadline (request read + TTFT + k * ITL), so
 * nothing drifts, and its lateness is logged: the truth says how true it is. Linux only.
 *
 *   cc -O2 -o truthd *.c && ./truthd --port 8100 --ttft-s 0.05 --itl-s 0.01 --log truth.csv
 *
 * Prints READY http://127.0.0.1:PORT on stdout. SIGTERM and SIGINT end it; then the log is written.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "connection.h"
#include "reply.h"

#define MOST_EVENTS 256
#define STEPS_PER_TURN 16       /* deadlines served before sockets are looked at again */
#define LONGEST_WAIT_NS 100000000
#define BACKLOG 8192
#define REFUSAL_PERIOD_NS 100000000
#define REFUSAL_WAIT_NS 1000000 /* how exact opening and closing the port is */

static volatile sig_atomic_t is_told_to_stop;

static void note_signal(int number) {
    (void)number;
    is_told_to_stop = 1;
}

/* The listening socket, or -1 while connections are to be refused. */
struct listener {
    int fd, port;
    uint32_t n_accepted;
    uint64_t started_ns;
};

static void fail(const char *what) {
    fprintf(stderr, "error: %s: %s\n", what, strerror(errno));
    exit(2);
}

static int listen_on(int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

static int port_of(int fd) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &size);
    return ntohs(address.sin_port);
}

static void watch(const struct server *server, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(server->epoll, EPOLL_CTL_ADD, fd, &event);
}

static void accept_all(struct server *server, struct listener *listener) {
    int fd, one = 1;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        uint32_t number = listener->n_accepted++;
        /* Its own stream of chance: which requests fail must not depend on it. */
        bool is_reset = chance(server->options->seed + 1, number) < server->options->reset_share;
        record_connection(server->record, is_reset);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *connection = connection_open(server, fd, number);
        connection->is_over = connection->is_reset = is_reset;
        connection_settle(server, connection);
    }
}

/* The port is closed in the last part of every tenth of a second: then the kernel refuses connections. */
static void open_or_close(struct server *server, struct listener *listener, uint64_t now) {
    double share = server->options->refuse_share;
    if (share <= 0) return;
    double into = (double)((now - listener->started_ns) % REFUSAL_PERIOD_NS) / REFUSAL_PERIOD_NS;
    bool is_refusing = into >= 1 - share;
    if (is_refusing && listener->fd >= 0) {
        accept_all(server, listener); /* those were there before we closed */
        close(listener->fd);
        listener->fd = -1;
    } else if (!is_refusing && listener->fd < 0) {
        listener->fd = listen_on(listener->port); /* if the port is taken, try again later */
        if (listener->fd >= 0) watch(server, listener->fd);
    }
}

static void serve_connection(struct server *server, struct connection *connection,
                             uint32_t events) {
    if (events & EPOLLOUT) reply_continue(server, connection);
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && !connection->is_over) {
        if (!connection_read(connection)) connection->is_over = true;
        else reply_to_input(server, connection);
    }
    connection_settle(server, connection);
}

/* Sleep until a socket has something or the next deadline is near; finer than epoll's millisecond.
 */
static void wait_for_work(const struct server *server, uint64_t now) {
    const struct connection *next = queue_first(&server->queue);
    uint64_t longest_ns = server->options->refuse_share > 0 ? REFUSAL_WAIT_NS : LONGEST_WAIT_NS;
    uint64_t wait_ns = longest_ns;
    if (next != NULL) {
        uint64_t wake_ns = next->due_ns - server->options->spin_ns;
        wait_ns = next->due_ns < now + server->options->spin_ns ? 0 : wake_ns - now;
    }
    if (wait_ns == 0) return;
    if (wait_ns > longest_ns) wait_ns = longest_ns;
    struct timespec timeout = {.tv_nsec = (long)wait_ns};
    struct pollfd sockets = {.fd = server->epoll, .events = POLLIN};
    ppoll(&sockets, 1, &timeout, NULL);
}

static void serve(struct server *server, struct listener *listener) {
    const struct options *options = server->options;
    struct epoll_event events[MOST_EVENTS];
    uint64_t end_ns = listener->started_ns + options->limit_ns, now;
    while (!is_told_to_stop && (now = now_ns()) < end_ns) {
        if (options->parent_pid && getppid() != options->parent_pid) break;
        open_or_close(server, listener, now);
        struct connection *due;
        for (int n = 0; n < STEPS_PER_TURN; n++) {
            if ((due = queue_first(&server->queue)) == NULL || due->due_ns > now) break;
            reply_step(server, due);
            connection_settle(server, due);
            now = now_ns();
        }
        wait_for_work(server, now);
        int n = epoll_wait(server->epoll, events, MOST_EVENTS, 0);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr != NULL)
                serve_connection(server, events[i].data.ptr, events[i].events);
            else if (listener->fd >= 0) accept_all(server, listener);
        }
    }
}

static void prepare_process(const struct options *options) {
    struct sigaction action = {.sa_handler = note_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1); /* the default 50 us would be added to every wake-up */
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    if (options->cpu >= 0) {
        cpu_set_t cores;
        CPU_ZERO(&cores);
        CPU_SET((unsigned)options->cpu, &cores);
        if (sched_setaffinity(0, sizeof cores, &cores)) fail("--cpu");
    }
}

int main(int n_words, char **words) {
    struct options options = parse_options(n_words, words);
    prepare_process(&options);
    struct server server = {.options = &options, .record = record_new(&options),
                            .epoll = epoll_create1(EPOLL_CLOEXEC), .started_ns = now_ns()};
    struct listener listener = {.fd = listen_on(options.port), .started_ns = now_ns()};
    if (listener.fd < 0) fail("cannot listen on 127.0.0.1");
    listener.port = port_of(listener.fd);
    watch(&server, listener.fd);
    printf("READY http://127.0.0.1:%d\n", listener.port);
    fflush(stdout);
    serve(&server, &listener);
    return record_write(server.record) ? 0 : 1;
}

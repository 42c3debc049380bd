/* The least a load client can do on one core: what the operating system itself costs.
 *
 *   c_client --port P --rows OUT.csv --tokens N --due FILE          open loop: send at these instants
 *   c_client --port P --rows OUT.csv --tokens N --users N --for S   closed loop: N users, no pause
 *
 * One thread, one epoll, one stamp per read, no parsing beyond counting the blank lines that end
 * events. FILE holds seconds since the epoch (f64, sorted), and the epoch is 0.2 s after the last
 * connection stands. Needs -D_GNU_SOURCE. Prints one JSON line; instants in the CSV are CLOCK_MONOTONIC nanoseconds.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define LEAD_NS 200000000ull
#define SPIN_NS 100000ull /* look again instead of sleeping so long before a send is due */
#define GIVE_UP_NS 30000000000ull
#define MOST_SENDS_PER_TURN 8
#define PREOPENED_S 0.8 /* connections opened ahead, as seconds of arrivals */

typedef struct {
    uint64_t due_ns, sent_ns, first_ns, last_ns, done_ns;
    long events;
} Row;

typedef struct Connection {
    int fd, row, tail_length;
    char tail[5]; /* the last bytes read: the end of a response may be cut by a read */
    struct Connection *next;
} Connection;

static int port, tokens = 64, epoll_fd;
static double cpu_before_s; /* when the first request was about to go */
static Connection *idle;
static Row *rows;
static char buffer[1 << 20];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static Connection *connect_one(void) {
    Connection *connection = calloc(1, sizeof *connection);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    connection->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(connection->fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, connection->fd, &event);
    return connection;
}

static void send_row(int row) {
    static char request[4096], body[2048];
    Connection *connection = idle;
    if (connection) idle = connection->next;
    else connection = connect_one();
    connection->row = row;
    connection->tail_length = 0;
    int size = snprintf(body, sizeof body,
                        "{\"model\":\"mock\",\"messages\":[{\"role\":\"user\",\"content\":\"one two three four "
                        "five six seven eight nine ten\"}],\"max_tokens\":%d,\"temperature\":0.0,\"stream\":true,"
                        "\"stream_options\":{\"include_usage\":true}}", tokens);
    int length = snprintf(request, sizeof request,
                          "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
                          "content-type: application/json\r\nx-seq: %d\r\ncontent-length: %d\r\n\r\n%s",
                          row, size, body);
    rows[row].sent_ns = now_ns();
    if (write(connection->fd, request, (size_t)length) != length) fail("write");
}

/* Whether this read ends the response: its bytes end with the last chunk, "0 CRLF CRLF". */
static int ends_response(Connection *connection, const char *data, size_t n) {
    char last[10];
    size_t kept = (size_t)connection->tail_length, take = n < 5 ? n : 5;
    memcpy(last, connection->tail, kept);
    memcpy(last + kept, data + n - take, take);
    size_t have = kept + take, drop = have > 5 ? have - 5 : 0;
    connection->tail_length = (int)(have - drop);
    memcpy(connection->tail, last + drop, have - drop);
    return have - drop == 5 && !memcmp(connection->tail, "0\r\n\r\n", 5);
}

static void take_in(Connection *connection, const char *data, size_t n, uint64_t at_ns) {
    Row *row = &rows[connection->row];
    const char *at = data, *end = data + n;
    while ((at = memmem(at, (size_t)(end - at), "\n\n", 2)) != NULL) row->events++, at += 2;
    if (!row->first_ns && memmem(data, n, "\"delta\":{\"content\"", 18)) row->first_ns = at_ns;
    if (!row->last_ns && row->events >= tokens + 1) row->last_ns = at_ns; /* + the role chunk */
    if (!ends_response(connection, data, n)) return;
    row->done_ns = at_ns;
    connection->next = idle;
    idle = connection;
}

/* Reads what is there; returns how many responses ended. */
static int read_sockets(struct timespec wait) {
    static struct epoll_event events[256];
    int n = epoll_pwait2(epoll_fd, events, 256, &wait, NULL), n_done = 0;
    for (int i = 0; i < n; i++) {
        Connection *connection = events[i].data.ptr;
        ssize_t got = read(connection->fd, buffer, sizeof buffer);
        uint64_t at_ns = now_ns();
        if (got <= 0) fail("read");
        take_in(connection, buffer, (size_t)got, at_ns);
        n_done += rows[connection->row].done_ns == at_ns;
    }
    return n_done;
}

static double *read_due(const char *path, int *n) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path);
    fseek(file, 0, SEEK_END);
    *n = (int)(ftell(file) / (long)sizeof(double));
    rewind(file);
    double *due = malloc((size_t)*n * sizeof *due + 1);
    if (fread(due, sizeof *due, (size_t)*n, file) != (size_t)*n) fail(path);
    fclose(file);
    return due;
}

static int open_loop(const double *due_s, int n) {
    int preopened = (int)(n / (due_s[n - 1] + 1e-9) * PREOPENED_S) + 16, sent = 0, done = 0;
    for (int i = 0; i < preopened && i < n; i++) {
        Connection *connection = connect_one();
        connection->next = idle;
        idle = connection;
    }
    uint64_t epoch_ns = now_ns() + LEAD_NS;
    cpu_before_s = cpu_s();
    for (int i = 0; i < n; i++) rows[i].due_ns = epoch_ns + (uint64_t)(due_s[i] * 1e9);
    while (done < n) {
        uint64_t now = now_ns();
        for (int k = 0; k < MOST_SENDS_PER_TURN && sent < n && rows[sent].due_ns <= now; k++) {
            send_row(sent++);
            now = now_ns();
        }
        struct timespec wait = {1, 0};
        if (sent < n) {
            uint64_t due = rows[sent].due_ns, ns = due > now + SPIN_NS ? due - now - SPIN_NS : 0;
            wait = (struct timespec){(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
        }
        done += read_sockets(wait);
        if (now > rows[n - 1].due_ns + GIVE_UP_NS) break;
    }
    return sent;
}

static int closed_loop(int users, double for_s, int most) {
    int sent = 0, done = 0;
    for (int i = 0; i < users; i++) {
        Connection *connection = connect_one();
        connection->next = idle;
        idle = connection;
    }
    cpu_before_s = cpu_s();
    uint64_t start_ns = now_ns(), end_ns = start_ns + (uint64_t)(for_s * 1e9), now;
    while ((now = now_ns()) < end_ns + GIVE_UP_NS) {
        while (now < end_ns && idle && sent < most) {
            rows[sent].due_ns = now_ns();
            send_row(sent++);
        }
        if (now >= end_ns && done == sent) break;
        done += read_sockets((struct timespec){0, 10000000});
    }
    return sent;
}

int main(int n_words, char **words) {
    const char *out = "rows.csv", *due_path = NULL;
    int users = 0;
    double for_s = 0;
    for (int i = 1; i + 1 < n_words; i += 2) {
        if (!strcmp(words[i], "--port")) port = atoi(words[i + 1]);
        else if (!strcmp(words[i], "--tokens")) tokens = atoi(words[i + 1]);
        else if (!strcmp(words[i], "--rows")) out = words[i + 1];
        else if (!strcmp(words[i], "--due")) due_path = words[i + 1];
        else if (!strcmp(words[i], "--users")) users = atoi(words[i + 1]);
        else if (!strcmp(words[i], "--for")) for_s = atof(words[i + 1]);
        else return fprintf(stderr, "unknown option %s\n", words[i]), 2;
    }
    prctl(PR_SET_TIMERSLACK, 1);
    epoll_fd = epoll_create1(0);
    int n = 0, sent;
    double *due_s = due_path ? read_due(due_path, &n) : NULL;
    if (!due_path) n = (int)(for_s * 50000) + users;
    rows = calloc((size_t)n, sizeof *rows);
    sent = due_path ? open_loop(due_s, n) : closed_loop(users, for_s, n);
    double used_s = cpu_s() - cpu_before_s;
    FILE *file = fopen(out, "w");
    if (!file) fail(out);
    fputs("seq,due_ns,sent_ns,first_ns,last_ns,done_ns,events\n", file);
    for (int i = 0; i < sent; i++)
        fprintf(file, "%d,%lu,%lu,%lu,%lu,%lu,%ld\n", i, rows[i].due_ns, rows[i].sent_ns,
                rows[i].first_ns, rows[i].last_ns, rows[i].done_ns, rows[i].events);
    if (fclose(file)) fail(out);
    printf("{\"cpu_s\": %.6f}\n", used_s);
    return 0;
}

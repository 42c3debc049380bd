#include "request.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MOST_BYTES (64u << 20)
#define MOST_HEAD (64u << 10)
#define TEMPLATE_TOKENS 8
#define CHARACTERS_PER_TOKEN 4

struct span {
    const char *at, *end;
};

static const char *find(struct span in, const char *word) {
    return memmem(in.at, (size_t)(in.end - in.at), word, strlen(word));
}

/* The value of a header, blanks before it skipped, or NULL. */
static const char *header(struct span head, const char *name) {
    size_t length = strlen(name);
    const char *line = head.at;
    while ((line = memchr(line, '\n', (size_t)(head.end - line))) != NULL) {
        line++;
        if ((size_t)(head.end - line) <= length) return NULL;
        if (strncasecmp(line, name, length) == 0 && line[length] == ':') {
            const char *value = line + length + 1;
            while (*value == ' ' || *value == '\t') value++;
            return value;
        }
    }
    return NULL;
}

static const char *skip_blanks(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n", *at) != NULL && *at != '\0') at++;
    return at;
}

/* Where the value of the next `"key":` starts, or NULL. Inside a JSON string quotes are escaped, so
 * a prompt that mentions a key is not mistaken for it. */
static const char *value_of(struct span body, const char *key) {
    while ((body.at = find(body, key)) != NULL) {
        body.at = skip_blanks(body.at + strlen(key), body.end);
        if (body.at < body.end && *body.at == ':') return skip_blanks(body.at + 1, body.end);
    }
    return NULL;
}

static int integer_at(struct span body, const char *key) {
    const char *value = value_of(body, key);
    if (value == NULL || *value < '0' || *value > '9') return 0;
    long number = strtol(value, NULL, 10);
    return number > 1000000 ? 1000000 : (int)number;
}

static bool is_true(struct span body, const char *key) {
    const char *value = value_of(body, key);
    return value != NULL && body.end - value >= 4 && memcmp(value, "true", 4) == 0;
}

/* Characters of the JSON string that starts at `value`, an escape counted as one; 0 for none. */
static size_t string_length(const char *value, const char *end) {
    size_t n = 0;
    if (value == NULL || value >= end || *value != '"') return 0;
    for (value++; value < end && *value != '"'; value++) {
        if (*value == '\\') value += value + 1 < end && value[1] == 'u' ? 5 : 1;
        n += ((unsigned char)*value & 0xc0) != 0x80; /* UTF-8 continuation bytes are no characters */
    }
    return n;
}

static int prompt_tokens(struct span body, bool is_chat) {
    const char *key = is_chat ? "\"content\"" : "\"prompt\"", *value;
    size_t n = 0;
    while ((value = value_of(body, key)) != NULL) {
        n += string_length(value, body.end);
        body.at = value;
    }
    return (int)(n / CHARACTERS_PER_TOKEN) + (is_chat ? TEMPLATE_TOKENS : 0);
}

static void copy_model(struct span body, char *model, size_t size) {
    const char *value = value_of(body, "\"model\"");
    const char *end = value && *value == '"' ? memchr(value + 1, '"', (size_t)(body.end - value - 1))
                                             : NULL;
    strcpy(model, "truth");
    if (end == NULL || (size_t)(end - value - 1) >= size) return;
    if (memchr(value, '\\', (size_t)(end - value)) != NULL) return;
    memcpy(model, value + 1, (size_t)(end - value - 1));
    model[end - value - 1] = '\0';
}

static enum route route_of(struct span line) {
    if (memcmp(line.at, "POST ", 5) == 0 && find(line, "/completions")) return ROUTE_COMPLETION;
    if (memcmp(line.at, "GET ", 4) != 0) return ROUTE_UNKNOWN;
    if (find(line, "/v1/models")) return ROUTE_MODELS;
    return find(line, "/health") || find(line, "/version") ? ROUTE_HEALTH : ROUTE_UNKNOWN;
}

static void read_body(struct span body, struct request *request) {
    request->is_streamed = is_true(body, "\"stream\"");
    request->wants_usage = is_true(body, "\"include_usage\"");
    request->wants_running_usage = is_true(body, "\"continuous_usage_stats\"");
    request->output_tokens = integer_at(body, "\"max_completion_tokens\"");
    if (request->output_tokens == 0) request->output_tokens = integer_at(body, "\"max_tokens\"");
    request->prompt_tokens = prompt_tokens(body, request->is_chat);
    copy_model(body, request->model, sizeof request->model);
}

enum parsed parse_request(const char *bytes, size_t size, struct request *request) {
    struct span head = {bytes, bytes + size};
    const char *blank = find(head, "\r\n\r\n");
    if (blank == NULL) return size > MOST_HEAD ? PARSED_UNFIT : PARSED_PARTLY;
    head.end = blank + 4;
    if (head.end - head.at < 16 || header(head, "transfer-encoding")) return PARSED_UNFIT;
    const char *stated = header(head, "content-length");
    unsigned long body_bytes = stated ? strtoul(stated, NULL, 10) : 0;
    if (body_bytes > MOST_BYTES) return PARSED_UNFIT;
    *request = (struct request){.length = (size_t)(head.end - head.at) + body_bytes};
    if (size < request->length)
        return header(head, "expect") ? PARSED_PARTLY_EXPECTS : PARSED_PARTLY;
    struct span line = {head.at, memchr(head.at, '\r', (size_t)(head.end - head.at))};
    request->route = route_of(line);
    request->is_chat = find(line, "/chat/") != NULL;
    const char *seq = header(head, "x-seq"), *connection = header(head, "connection");
    request->seq = seq ? strtoll(seq, NULL, 10) : -1;
    request->closes = connection != NULL && strncasecmp(connection, "close", 5) == 0;
    read_body((struct span){head.end, bytes + request->length}, request);
    return PARSED_WHOLE;
}

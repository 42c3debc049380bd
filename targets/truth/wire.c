#include "wire.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define CHUNK_HEAD 10 /* eight hexadecimal digits and CRLF: a fixed size can be filled in later */

static const char *const WORDS[] = {" the",   " model", " of",    " latency", " token", " and",
                                    " server", " time",  " is",    " stream",  " a",     " batch",
                                    " to",    " request", " value", " cache"};
#define N_WORDS (int)(sizeof WORDS / sizeof *WORDS)

static void put(struct buffer *out, const char *text) { buffer_append(out, text, strlen(text)); }

static void __attribute__((format(printf, 2, 3))) put_format(struct buffer *out,
                                                             const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    buffer_append(out, text, n < (int)sizeof text ? (size_t)n : sizeof text - 1);
}

/* Chunked transfer coding (RFC 9112 §7.1): leave room for the size, and fill it in at the end.
 * Offsets count from `start`, because the buffer may move its bytes to make room. */
static size_t open_chunk(struct buffer *out) {
    size_t at = buffer_length(out);
    buffer_append(out, "00000000\r\n", CHUNK_HEAD);
    return at;
}

static void close_chunk(struct buffer *out, size_t at) {
    size_t size = buffer_length(out) - at - CHUNK_HEAD;
    char *digits = out->data + out->start + at;
    for (int i = 7; i >= 0; i--, size >>= 4) digits[i] = "0123456789abcdef"[size & 15];
    put(out, "\r\n");
}

struct reply_text reply_text(const struct request *request, unsigned number, int output_tokens) {
    struct reply_text text = {
        .is_chat = request->is_chat,
        .has_usage = request->wants_usage || request->wants_running_usage || !request->is_streamed,
        .has_running_usage = request->wants_running_usage,
        .prompt_tokens = request->prompt_tokens,
        .output_tokens = output_tokens,
    };
    snprintf(text.id, sizeof text.id, "%s-%08x%08x%08x", request->is_chat ? "chatcmpl" : "cmpl",
             number, number * 2654435761u, 0x9e3779b9u);
    snprintf(text.model, sizeof text.model, "%s", request->model);
    snprintf(text.kind, sizeof text.kind, "%s",
             !request->is_chat       ? "text_completion"
             : request->is_streamed ? "chat.completion.chunk"
                                     : "chat.completion");
    int n = snprintf(text.head, sizeof text.head,
                     "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":1760000000,\"model\":"
                     "\"%s\",\"choices\":[", text.id, text.kind, text.model);
    text.head_length = (size_t)n;
    return text;
}

static const char *reason_of(int status) {
    switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 411: return "Length Required";
    case 429: return "Too Many Requests";
    case 503: return "Service Unavailable";
    default: return status < 500 ? "Client Error" : "Internal Server Error";
    }
}

void put_response(struct buffer *out, int status, const char *body, size_t size, bool closes) {
    put_format(out, "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n%s\r\n",
               status, reason_of(status), size, closes ? "connection: close\r\n" : "");
    buffer_append(out, body, size);
}

void put_error(struct buffer *out, int status, bool closes) {
    char body[160];
    int n = snprintf(body, sizeof body,
                     "{\"error\":{\"message\":\"scripted failure %d\",\"type\":\"scripted\","
                     "\"code\":%d}}", status, status);
    put_response(out, status, body, (size_t)n, closes);
}

void put_stream_head(struct buffer *out, bool closes) {
    put_format(out, "HTTP/1.1 200 OK\r\nserver: truthd\r\ncontent-type: text/event-stream; "
                    "charset=utf-8\r\ntransfer-encoding: chunked\r\n%s\r\n",
               closes ? "connection: close\r\n" : "");
}

static void put_counts(struct buffer *out, const struct reply_text *text, int output_tokens) {
    put_format(out, ",\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}",
               text->prompt_tokens, text->prompt_tokens + output_tokens, output_tokens);
}

void put_role(struct buffer *out, const struct reply_text *text) {
    size_t chunk = open_chunk(out);
    buffer_append(out, text->head, text->head_length);
    put(out, "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
             "\"finish_reason\":null}]");
    if (text->has_running_usage) put_counts(out, text, 0);
    put(out, "}\n\n");
    close_chunk(out, chunk);
}

void put_tokens(struct buffer *out, const struct reply_text *text, int first, int n, bool is_end) {
    size_t chunk = open_chunk(out);
    buffer_append(out, text->head, text->head_length);
    put(out, text->is_chat ? "{\"index\":0,\"delta\":{\"content\":\"" : "{\"index\":0,\"text\":\"");
    for (int i = first; i < first + n; i++) put(out, WORDS[i % N_WORDS]);
    put(out, text->is_chat ? "\"},\"logprobs\":null" : "\",\"logprobs\":null");
    put(out, is_end ? ",\"finish_reason\":\"length\"" : ",\"finish_reason\":null");
    put(out, ",\"stop_reason\":null,\"token_ids\":null}]");
    if (text->has_running_usage) put_counts(out, text, first + n);
    put(out, "}\n\n");
    close_chunk(out, chunk);
}

void put_finish(struct buffer *out, const struct reply_text *text) {
    size_t chunk = open_chunk(out);
    buffer_append(out, text->head, text->head_length);
    put(out, text->is_chat ? "{\"index\":0,\"delta\":{}" : "{\"index\":0,\"text\":\"\"");
    put(out, ",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}]");
    if (text->has_running_usage) put_counts(out, text, text->output_tokens);
    put(out, "}\n\n");
    close_chunk(out, chunk);
}

void put_usage(struct buffer *out, const struct reply_text *text) {
    size_t chunk = open_chunk(out);
    buffer_append(out, text->head, text->head_length);
    put(out, "]");
    put_counts(out, text, text->output_tokens);
    put(out, "}\n\n");
    close_chunk(out, chunk);
}

void put_inband_error(struct buffer *out) {
    size_t chunk = open_chunk(out);
    put(out, "data: {\"error\":{\"message\":\"scripted failure in mid-stream\",\"type\":"
             "\"scripted\",\"code\":500}}\n\n");
    close_chunk(out, chunk);
}

void put_done(struct buffer *out) {
    size_t chunk = open_chunk(out);
    put(out, "data: [DONE]\n\n");
    close_chunk(out, chunk);
}

void put_last_chunk(struct buffer *out) { put(out, "0\r\n\r\n"); }

void put_whole(struct buffer *out, const struct reply_text *text, bool closes) {
    struct buffer body = {0};
    put_format(&body, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":1760000000,\"model\":\"%s\","
                      "\"choices\":[{\"index\":0,%s", text->id, text->kind, text->model,
               text->is_chat ? "\"message\":{\"role\":\"assistant\",\"content\":\"" : "\"text\":\"");
    for (int i = 0; i < text->output_tokens; i++) put(&body, WORDS[i % N_WORDS]);
    put(&body, text->is_chat ? "\"}" : "\"");
    put(&body, ",\"logprobs\":null,\"finish_reason\":\"length\"}]");
    if (text->has_usage) put_counts(&body, text, text->output_tokens);
    put(&body, "}");
    put_response(out, 200, body.data, buffer_length(&body), closes);
    buffer_free(&body);
}

void put_models(struct buffer *out, bool closes) {
    static const char body[] =
        "{\"object\":\"list\",\"data\":[{\"id\":\"truth\",\"object\":\"model\",\"created\":"
        "1760000000,\"owned_by\":\"slobench\",\"max_model_len\":131072}]}";
    put_response(out, 200, body, sizeof body - 1, closes);
}

/* The bytes this server sends: HTTP heads, JSON bodies, and events as chunks of an event stream. */
#ifndef WIRE_H
#define WIRE_H

#include <stdbool.h>
#include <stddef.h>

#include "basics.h"
#include "request.h"

/* What all chunks of one reply have in common. */
struct reply_text {
    char head[384], kind[24], id[48], model[96];
    size_t head_length;
    bool is_chat, has_usage, has_running_usage;
    int prompt_tokens, output_tokens;
};

struct reply_text reply_text(const struct request *request, unsigned number, int output_tokens);

/* Each appends to `out`. */
void put_response(struct buffer *out, int status, const char *body, size_t size, bool closes);
void put_error(struct buffer *out, int status, bool closes);
void put_stream_head(struct buffer *out, bool closes);
void put_role(struct buffer *out, const struct reply_text *text);
/* Tokens [first, first + n) as one event; `is_end` lets the finish reason ride on it. */
void put_tokens(struct buffer *out, const struct reply_text *text, int first, int n, bool is_end);
void put_finish(struct buffer *out, const struct reply_text *text);
void put_usage(struct buffer *out, const struct reply_text *text);
void put_inband_error(struct buffer *out);
void put_done(struct buffer *out);
void put_last_chunk(struct buffer *out);
void put_whole(struct buffer *out, const struct reply_text *text, bool closes);
void put_models(struct buffer *out, bool closes);

#endif

#include "reply.h"

#include <stdio.h>
#include <string.h>

#include "request.h"

static struct row *row_of(struct server *server, struct connection *connection) {
    return record_row(server->record, connection->reply.row);
}

/* The reply ends when the kernel has all of it; then the next request can be answered. */
static void end_if_sent(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    if (reply->stage != STAGE_SENDING || buffer_length(&connection->out) > 0) return;
    row_of(server, connection)->done_ns = now_ns();
    reply->stage = STAGE_IDLE;
    connection->n_requests++;
    if (reply->closes) connection->is_over = true;
}

static void send_all(struct server *server, struct connection *connection) {
    connection->reply.stage = STAGE_SENDING;
    connection_flush(server, connection);
    end_if_sent(server, connection);
}

/* The byte of the connection at which what is in the buffer now will have been sent. */
static uint64_t mark(const struct connection *connection) {
    return connection->n_sent_bytes + buffer_length(&connection->out);
}

static void write_tail(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    if (reply->text.has_usage && server->options->sends_usage)
        put_usage(&connection->out, &reply->text);
    if (server->options->sends_done) put_done(&connection->out);
    put_last_chunk(&connection->out);
    send_all(server, connection);
}

/* Go wrong half way, as scripted. */
static void break_off(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    if (reply->failure->kind == FAIL_CUT) { /* FIN without a last chunk */
        reply->closes = true;
    } else {
        put_inband_error(&connection->out);
        put_done(&connection->out);
        put_last_chunk(&connection->out);
    }
    send_all(server, connection);
}

/* How many tokens are written: with a failure in mid-stream, half of those asked for. */
static int tokens_until_end(const struct reply *reply) {
    int total = reply->text.output_tokens;
    return reply->failure ? total / 2 : total;
}

static bool breaks_now(const struct reply *reply) {
    return reply->failure && reply->token >= tokens_until_end(reply);
}

/* When a token is due that without stalls would be due at `due_ns`. The steps of all streams share
 * a clock: each period has `stall_every` steps and then the stall, whose end a token due in it waits
 * for. Later tokens of the stream move with it. */
static uint64_t past_stalls(const struct server *server, struct reply *reply, uint64_t due_ns) {
    const struct options *options = server->options;
    due_ns += reply->stalled_ns;
    if (options->stall_every == 0) return due_ns;
    uint64_t steps_ns = (uint64_t)options->stall_every * options->itl_ns;
    uint64_t into_ns = (due_ns - server->started_ns) % (steps_ns + options->stall_ns);
    uint64_t held_ns = into_ns < steps_ns ? 0 : steps_ns + options->stall_ns - into_ns;
    reply->stalled_ns += held_ns;
    return due_ns + held_ns;
}

static void write_tokens(struct server *server, struct connection *connection) {
    const struct options *options = server->options;
    struct reply *reply = &connection->reply;
    struct row *row = row_of(server, connection);
    int total = reply->text.output_tokens, first = reply->token;
    if (breaks_now(reply)) {
        break_off(server, connection);
        return;
    }
    if (first == 0) {
        record_reserve_tokens(server->record, row);
        if (reply->text.is_chat && options->role == ROLE_FIRST)
            put_role(&connection->out, &reply->text);
    }
    int until = tokens_until_end(reply);
    for (int event = 0; event < options->burst && reply->token < until; event++) {
        int n = until - reply->token;
        if (n > options->tokens_per_event) n = options->tokens_per_event;
        bool is_end = options->finish_rides && reply->token + n == total;
        put_tokens(&connection->out, &reply->text, reply->token, n, is_end);
        if (reply->token == 0) reply->first_mark = mark(connection);
        reply->token += n;
    }
    if (reply->token == total) reply->last_mark = mark(connection);
    uint64_t at_ns = now_ns(); /* composed; now it is written */
    /* Without a pace there is nothing to be late for but the first token. */
    uint64_t due_ns = options->itl_ns || first == 0 ? reply->due_ns : 0;
    record_tokens(server->record, row, first, reply->token - first, at_ns, due_ns);
    if (first == 0) row->first_ns = at_ns;
    if (reply->token == total) row->last_ns = at_ns;
    connection_flush(server, connection);
    if (reply->token < total) {
        uint64_t paced_ns = row->due_ns + (uint64_t)reply->token * options->itl_ns;
        reply->due_ns = options->itl_ns
                            ? past_stalls(server, reply, paced_ns)
                            : now_ns(); /* behind everyone who is waiting: round robin */
        return;
    }
    if (!options->finish_rides) put_finish(&connection->out, &reply->text);
    if (options->usage_delay_ns) {
        connection_flush(server, connection);
        reply->stage = STAGE_TAIL;
        reply->due_ns = at_ns + options->usage_delay_ns;
    } else write_tail(server, connection);
}

static void write_whole(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    struct row *row = row_of(server, connection);
    put_whole(&connection->out, &reply->text, reply->closes);
    reply->first_mark = reply->last_mark = mark(connection);
    row->first_ns = row->last_ns = now_ns();
    record_reserve_tokens(server->record, row);
    record_tokens(server->record, row, 0, row->asked_tokens, row->first_ns, reply->due_ns);
    send_all(server, connection);
}

void reply_step(struct server *server, struct connection *connection) {
    uint64_t now = now_ns();
    struct reply *reply = &connection->reply;
    if (connection->piece_due_ns && connection->piece_due_ns <= now) {
        connection->piece_due_ns = 0;
        reply_continue(server, connection);
    }
    if (connection->is_over || reply->due_ns > now) return;
    if (reply->stage == STAGE_TOKENS) write_tokens(server, connection);
    else if (reply->stage == STAGE_TAIL) write_tail(server, connection);
    else if (reply->stage == STAGE_WHOLE) write_whole(server, connection);
    if (reply->stage == STAGE_IDLE && !connection->is_over) reply_to_input(server, connection);
}

void reply_continue(struct server *server, struct connection *connection) {
    connection_flush(server, connection);
    end_if_sent(server, connection);
    if (connection->reply.stage == STAGE_IDLE && !connection->is_over)
        reply_to_input(server, connection);
}

static void start_stream(struct server *server, struct connection *connection) {
    struct reply *reply = &connection->reply;
    put_stream_head(&connection->out, reply->closes);
    connection_flush(server, connection);
    if (reply->text.is_chat && server->options->role == ROLE_EARLY) {
        put_role(&connection->out, &reply->text);
        connection_flush(server, connection);
    }
    reply->stage = STAGE_TOKENS;
}

/* Failures that need no token: true when that was all. */
static bool fails_at_once(struct server *server, struct connection *connection, bool is_streamed) {
    struct reply *reply = &connection->reply;
    if (reply->failure == NULL) return false;
    switch (reply->failure->kind) {
    case FAIL_HANG:
        reply->stage = STAGE_HANG;
        return true;
    case FAIL_RESET:
        reply->stage = STAGE_SENDING;
        connection->is_over = connection->is_reset = true;
        return true;
    case FAIL_STATUS:
        put_error(&connection->out, reply->failure->status, reply->closes);
        send_all(server, connection);
        return true;
    default:
        if (is_streamed) return false;
        put_error(&connection->out, 500, reply->closes); /* no half way without a stream */
        send_all(server, connection);
        return true;
    }
}

static void start_reply(struct server *server, struct connection *connection,
                        const struct request *request, uint64_t read_ns) {
    const struct options *options = server->options;
    uint32_t number = record_add(server->record);
    struct row *row = record_row(server->record, number);
    int n = request->output_tokens ? request->output_tokens : options->default_tokens;
    *row = (struct row){
        .seq = request->seq, .connection = connection->number, .is_chat = request->is_chat,
        .asked_tokens = n, .prompt_tokens = request->prompt_tokens,
        .arrived_ns = connection->arrived_ns, .read_ns = read_ns,
        .due_ns = read_ns + options->ttft_ns,
    };
    int most = options->requests_per_connection;
    connection->reply = (struct reply){
        .row = number,
        .text = reply_text(request, number, n),
        .failure = failure_of(options, request->seq >= 0 ? (uint64_t)request->seq : number),
        .closes = request->closes || (most && connection->n_requests + 1 >= most),
        .due_ns = row->due_ns,
    };
    const struct failure *failure = connection->reply.failure;
    snprintf(row->outcome, sizeof row->outcome, "%s", failure ? failure->name : "ok");
    if (fails_at_once(server, connection, request->is_streamed)) return;
    if (request->is_streamed) {
        start_stream(server, connection);
    } else {
        connection->reply.stage = STAGE_WHOLE;
        connection->reply.due_ns += (uint64_t)(n - 1) * options->itl_ns;
    }
}

static void answer(struct server *server, struct connection *connection,
                   const struct request *request, uint64_t read_ns) {
    switch (request->route) {
    case ROUTE_COMPLETION:
        start_reply(server, connection, request, read_ns);
        return;
    case ROUTE_MODELS:
        put_models(&connection->out, request->closes);
        break;
    case ROUTE_HEALTH:
        put_response(&connection->out, 200, "{}", 2, request->closes);
        break;
    case ROUTE_UNKNOWN:
        put_error(&connection->out, 404, request->closes);
        break;
    }
    connection_flush(server, connection);
    if (request->closes) connection->is_over = true;
}

void reply_to_input(struct server *server, struct connection *connection) {
    struct buffer *in = &connection->in;
    while (connection->reply.stage == STAGE_IDLE && buffer_length(in) > 0 && !connection->is_over) {
        struct request request;
        switch (parse_request(in->data + in->start, buffer_length(in), &request)) {
        case PARSED_UNFIT:
            put_error(&connection->out, 411, true);
            connection_flush(server, connection);
            connection->is_over = true;
            return;
        case PARSED_PARTLY_EXPECTS:
            if (connection->was_told_to_go_on) return;
            connection->was_told_to_go_on = true;
            buffer_append(&connection->out, "HTTP/1.1 100 Continue\r\n\r\n", 25);
            connection_flush(server, connection);
            return;
        case PARSED_PARTLY:
            return;
        case PARSED_WHOLE:
            break;
        }
        uint64_t read_ns = now_ns();
        connection->was_told_to_go_on = false;
        buffer_consume(in, request.length);
        answer(server, connection, &request, read_ns);
        connection->arrived_ns = read_ns; /* of what is left, which came in the same read */
    }
}

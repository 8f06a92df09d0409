/* ========================================================================== */
/* >>pipeline-send                            MARK: - pipeline-send (private) */
/* Pipeline parallelism: what a stage has, and the tensors and gradients that */
/* it sends to other stages and receives from them.                           */
/* Needs: >>layers.                                                           */
/* ========================================================================== */

/* Each stage has one tape per micro-batch under way (tshi_micro) and swaps it into the ctx for the
 * micro-batch's forward, then for its backward. A tensor received from the previous stage is the
 * output of a node without inputs, whose backward sends the gradient back. Sends do not block until
 * a send queue is full; receives block. There is no deadlock: a rank receives from each neighbour
 * in the order in which that neighbour sends, and no send to one neighbour waits for a send to the
 * other. */
enum { TSHI_PIPELINE_SENDS = 16 }; /* max sends in flight in each direction; a comm's limit is 64 */

/* The description of a tensor, sent before its values as 64-bit words. */
typedef struct tshi_message {
    /* kind, cut, segments: kind, dim and number of segments of the layout */
    int64_t dtype, requires_grad, ndim, kind, cut, segments;
    int64_t more; /* 1: another tensor follows, the segments of tsh_set_segments */
    int64_t dim[TSH_MAX_DIMS];                               /* global shape */
    tsh_segment segment[TSH_MAX_SEGMENTS];                   /* segments of the layout */
} tshi_message;
enum { TSHI_PIPELINE_WORDS = sizeof(tshi_message) / sizeof(int64_t) };

/* The sends in flight to earlier stages, or to later ones: a ring buffer, oldest first. Each holds
 * a reference to the values being sent. */
typedef struct tshi_send_queue {
    tsh_req req[TSHI_PIPELINE_SENDS];       /* the requests of the sends */
    tshi_block *block[TSHI_PIPELINE_SENDS]; /* the values being sent */
    int first, count;                       /* index of the oldest send; number of sends */
} tshi_send_queue;

/* A parameter that several stages hold (tied). Each of them computes a part of its gradient. */
typedef struct tshi_tie {
    struct tshi_tie *next; /* next in tsh_pipeline.ties */
    tsh_tensor *param;
    unsigned char *holds; /* one entry per stage: 1 if the stage holds the parameter */
    int holders;          /* number of stages that hold it */
} tshi_tie;

struct tsh_pipeline {
    tsh_ctx *ctx;
    tsh_module *container;    /* the module whose children are assigned to stages */
    tsh_pipeline_desc desc;   /* the description given to tsh_pipeline_new */
    int *counts;              /* number of children of the container, one entry per stage */
    int stage, last;          /* stage: index of this rank's stage; last: index of the last stage */
    tsh_module *child;        /* the first child of this stage */
    /* warmup: number of forwards before the first backward; slots: max number of micro-batches
     * between forward and backward */
    int warmup, slots;
    tshi_micro *micro;        /* shape (slots): micro-batch k is in slot k % slots */
    tshi_send_queue queue[2]; /* sends [0] to earlier stages, [1] to later ones */
    tshi_tie *ties;           /* list of the tied parameters */
    /* on the last stage: [0] sum of losses; [1] sum of weights or, if losses are means, number of
     * micro-batches */
    double total[2];
};

/* -- sending to and receiving from other stages ------------------------------ */

/* Waits for the oldest send of a queue and releases its values. */
static void tshi_pipeline_wait_send(tsh_pipeline *p, tshi_send_queue *queue) {
    const int i = queue->first; /* the oldest send */
    (void)tshi_error_comm(p->ctx, tsh_wait(&p->ctx->pp, queue->req[i]), "tsh_pipeline: send");
    tshi_mem_release(p->ctx, queue->block[i]);
    queue->first = (i + 1) % TSHI_PIPELINE_SENDS;
    queue->count--;
}

/* Releases the values of completed sends. block 1: waits for all sends first; if the world has
 * failed, the waits return at once. */
static void tshi_pipeline_end_sends(tsh_pipeline *p, int block) {
    for (int i = 0; i < 2; i++)
        for (int done = 1; p->queue[i].count && done;) { /* ends at the first unfinished send */
            tshi_send_queue *queue = &p->queue[i];
            if (!block && tsh_test(&p->ctx->pp, queue->req[queue->first], &done) != TSH_OK) return;
            if (done) tshi_pipeline_wait_send(p, queue);
        }
}

/* Starts to send n elements at `data`, which lies in block, to stage `to`. Takes over the caller's
 * reference to block; releases it on failure. */
static void tshi_pipeline_send(tsh_pipeline *p, int to, tshi_block *block, const void *data,
                               int64_t n, tsh_dtype dtype) {
    /* queue[0] has the sends to earlier stages, queue[1] those to later ones */
    tshi_send_queue *queue = &p->queue[to > p->stage];
    tsh_coll coll = tsh_coll_make(TSH_SEND, dtype);
    tsh_req req = 0;
    tshi_pipeline_end_sends(p, 0);
    /* a full queue: wait for the oldest send, which makes room */
    if (queue->count == TSHI_PIPELINE_SENDS) tshi_pipeline_wait_send(p, queue);
    coll.send = data;
    coll.count = n;
    coll.send_to = to;
    if (!block || p->ctx->error.code != TSH_OK ||
        tshi_error_comm(p->ctx, tsh_start(&p->ctx->pp, &coll, &req), "tsh_pipeline: send") !=
            TSH_OK) {
        tshi_mem_release(p->ctx, block);
        return;
    }
    queue->req[(queue->first + queue->count) % TSHI_PIPELINE_SENDS] = req;
    queue->block[(queue->first + queue->count++) % TSHI_PIPELINE_SENDS] = block;
}

/* Receives n elements from stage `from`; blocks until they arrive. */
static tsh_result tshi_pipeline_receive(tsh_pipeline *p, int from, void *data, int64_t n,
                                        tsh_dtype dtype) {
    if (p->ctx->error.code != TSH_OK) return p->ctx->error.code;
    return tshi_error_comm(p->ctx, tsh_recv(&p->ctx->pp, data, n, dtype, from),
                           "tsh_pipeline: receive");
}

/* Sends n elements to stage `to`, as tshi_pipeline_send does, or in the wire's dtype. */
static void tshi_pipeline_send_values(tsh_pipeline *p, int to, tshi_block *block, void *data,
                                      int64_t n, tsh_dtype dtype) {
    const int wired = block && tshi_wire_dtype(p->ctx, TSHI_WIRE_ACTIVATION, dtype, n) != dtype;
    const size_t bytes = wired ? tshi_wire_bytes(p->ctx, n) : 0;
    if (wired) {
        tshi_block *message = tshi_mem_alloc(p->ctx, TSH_MEM_STEP, bytes);
        if (message) tshi_wire_encode(p->ctx, dtype, data, n, (char *)tshi_mem_data(message));
        tshi_mem_release(p->ctx, block);
        block = message;
        data = message ? tshi_mem_data(message) : NULL;
        n = (int64_t)(bytes / 2);
        dtype = tshi_wire_halves;
    }
    tshi_pipeline_send(p, to, block, data, n, dtype);
}

/* Receives what tshi_pipeline_send_values has sent. */
static tsh_result tshi_pipeline_receive_values(tsh_pipeline *p, int from, void *data, int64_t n,
                                               tsh_dtype dtype) {
    const int wired = tshi_wire_dtype(p->ctx, TSHI_WIRE_ACTIVATION, dtype, n) != dtype;
    const size_t bytes = wired ? tshi_wire_bytes(p->ctx, n) : 0;
    tshi_block *message;
    if (!wired) return tshi_pipeline_receive(p, from, data, n, dtype);
    message = tshi_mem_alloc(p->ctx, TSH_MEM_STEP, bytes);
    if (message && tshi_pipeline_receive(p, from, tshi_mem_data(message), (int64_t)(bytes / 2),
                                         tshi_wire_halves) == TSH_OK)
        tshi_wire_decode(p->ctx, dtype, data, n, (char *)tshi_mem_data(message));
    tshi_mem_release(p->ctx, message);
    return p->ctx->error.code;
}

/* -- tensors and gradients from stage to stage -------------------------------- */

/* Sends y to the next stage: its description, then this rank's shard. more: whether another tensor
 * will follow. */
static void tshi_pipeline_send_tensor(tsh_pipeline *p, tsh_tensor *y, int more) {
    tsh_ctx *ctx = p->ctx;
    tshi_message head = {y->dtype, !ctx->tape.no_grad && y->base->requires_grad, y->ndim,
                         y->layout.kind, y->layout.dim, y->layout.segments, more, {0}, {{0, 0}}};
    tshi_block *block = tshi_mem_alloc(ctx, TSH_MEM_STEP, sizeof head), *packed;
    void *data; /* y's values, contiguous */
    if (!block) return;
    memcpy(head.dim, y->dim, (size_t)y->ndim * sizeof *y->dim);
    memcpy(head.segment, y->layout.segment, sizeof head.segment);
    memcpy(tshi_mem_data(block), &head, sizeof head);
    tshi_pipeline_send(p, p->stage + 1, block, tshi_mem_data(block), TSHI_PIPELINE_WORDS, TSH_I64);
    data = tshi_kernel_packed(y, &packed);
    if (data && !packed) { /* y is dense: send its own block */
        packed = y->block;
        packed->refs++;
    }
    tshi_pipeline_send_values(p, p->stage + 1, packed, data, tsh_local_numel(y), y->dtype);
}

/* Sends the gradient of the micro-batch's input to the previous stage, from which the input came.
 * Takes over the caller's reference to block. block NULL: sends zeros, since the output does not
 * depend on the input. */
static void tshi_pipeline_send_grad(tshi_micro *micro, tshi_block *block) {
    tsh_pipeline *p = micro->pipeline;
    const int64_t n = tsh_local_numel(micro->input);
    if (!block) {
        block = tshi_mem_alloc(p->ctx, TSH_MEM_STEP, tshi_dtype_reals(n));
        if (block) memset(tshi_mem_data(block), 0, tshi_dtype_reals(n));
    }
    if (block) tshi_pipeline_send_values(p, p->stage - 1, block, tshi_mem_data(block), n, TSH_REAL);
    micro->input = NULL; /* no gradient has to be sent any more */
}

/* Backward of a received tensor: sends its gradient to the previous stage. */
static void tshi_pipeline_receive_backward(tshi_node *node) {
    node->out->gr.block->refs++; /* the send holds a reference */
    tshi_pipeline_send_grad((tshi_micro *)node->params, node->out->gr.block);
}

static const tshi_op tshi_pipeline_op = {
    "tsh_pipeline", NULL, NULL, tshi_pipeline_receive_backward, TSHI_NONE, 0};

/* Receives a tensor from the previous stage. Records it on the tape if it requires a gradient,
 * unless micro is NULL (evaluation). Sets *more: whether another one follows. */
static tsh_tensor *tshi_pipeline_receive_tensor(tsh_pipeline *p, tshi_micro *micro, int *more) {
    tshi_message head; /* x's description, received first */
    tsh_layout layout = tsh_replicated();
    tsh_shape shape = tsh_shape0();
    tshi_node *node;
    tsh_tensor *x;
    if (tshi_pipeline_receive(p, p->stage - 1, &head, TSHI_PIPELINE_WORDS, TSH_I64) != TSH_OK)
        return NULL;
    *more = (int)head.more;
    shape.ndim = (int)head.ndim;
    memcpy(shape.dim, head.dim, sizeof head.dim);
    layout.kind = (tsh_layout_kind)head.kind;
    layout.dim = (int)head.cut;
    layout.segments = (int)head.segments;
    memcpy(layout.segment, head.segment, sizeof head.segment);
    x = tshi_tensor_out(p->ctx, "tsh_pipeline", (tsh_dtype)head.dtype, &shape, &layout);
    if (!x || tshi_pipeline_receive_values(p, p->stage - 1, tshi_tensor_at(x), tsh_local_numel(x),
                                           x->dtype) != TSH_OK)
        return NULL;
    if (!micro || !head.requires_grad) return x; /* no gradient to send back */
    node = tshi_tape_add(&tshi_pipeline_op, x, NULL, 0, TSHI_NONE, 0);
    if (!node) return NULL;
    node->params = micro; /* read by tshi_pipeline_receive_backward */
    micro->input = x;
    return x;
}

/* Receives a micro-batch's tensor from the previous stage, and sets the segments that the first
 * stage had for it. */
static tsh_tensor *tshi_pipeline_receive_input(tsh_pipeline *p, tshi_micro *micro) {
    int more = 0;
    tsh_tensor *x = tshi_pipeline_receive_tensor(p, micro, &more);
    tsh_tensor *segments = more ? tshi_pipeline_receive_tensor(p, NULL, &more) : NULL;
    if (x && p->ctx->error.code == TSH_OK) (void)tsh_set_segments(p->container, segments);
    return x;
}

/* Sends y, and the segments of its micro-batch, if there are any, to the next stage. */
static void tshi_pipeline_send_output(tsh_pipeline *p, tsh_tensor *y) {
    tsh_tensor *segments = p->container->segments;
    if (segments && !tshi_tensor_check("tsh_pipeline", "segments", &segments, 1)) return;
    tshi_pipeline_send_tensor(p, y, segments != NULL);
    if (segments) tshi_pipeline_send_tensor(p, segments, 0);
}

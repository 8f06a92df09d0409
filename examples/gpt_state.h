/* gpt_state.h - what of a run of gpt.c its state depends on; state.h keeps it
 *
 * --save DIR is the folder. */
#ifndef GPT_STATE_H
#define GPT_STATE_H

#include "gpt_setup.h"
#include "state.h"

/* A line for each setting on which the losses depend, but for --steps: more may be asked for. */
static void gpt_describe(char text[STATE_SETTINGS], const gpt_settings *s, const gpt_text *t) {
    uint64_t hash = state_hash(STATE_HASH, t->byte_of, sizeof t->byte_of);
    hash = state_hash(hash, t->train, t->train_size);
    hash = state_hash(hash, t->val, t->val_size);
    snprintf(text, STATE_SETTINGS,
             "text of %lld bytes, hash %016llx\nchars %d\nlayers %lld\nheads %lld\nwidth %lld\n"
             "context %lld\nvocabulary %lld\nbatch %lld\nseed %lld\nlr %.15g\ndropout %.15g\n",
             (long long)(t->train_size + t->val_size), (unsigned long long)hash, s->chars,
             (long long)s->layers, (long long)s->heads, (long long)s->width, (long long)s->context,
             (long long)s->vocabulary, (long long)s->batch, (long long)s->seed, s->lr, s->dropout);
    if (s->outer > 0) { /* without it there is no line, either */
        const size_t used = strlen(text);
        snprintf(text + used, STATE_SETTINGS - used,
                 "outer %lld\nouter-wire %s\nouter-fragments %lld\nouter-delay %lld\n",
                 (long long)s->outer, s->outer_wire != NULL ? s->outer_wire : "f32",
                 (long long)s->outer_fragments, (long long)s->outer_delay);
    }
    if (strcmp(s->dtype, "f32") != 0) { /* f32 has no line: earlier versions wrote none */
        const size_t used = strlen(text);
        snprintf(text + used, STATE_SETTINGS - used, "dtype %s\n", s->dtype);
    }
}

/* Opens the folder of --save. Returns 0, or the exit code after a sentence. */
static int gpt_state_open(const gpt_settings *set, const gpt_text *text, int *found) {
    char now[STATE_SETTINGS];
    tsh_error why;
    gpt_describe(now, set, text);
    return state_open(set->save, set->resume, now, found, &why) ? 0 : refuse("%s", why.message);
}

#endif /* GPT_STATE_H */

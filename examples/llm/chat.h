/* chat.h - turns a conversation into the text that a model was trained on, by chat templates of the
 * Hugging Face hub
 *
 * A template is a program in Jinja. None is run here: those of the families in models/ are
 * recognized by a hash of their exact text, and rendered by a row of the table below, to the same
 * bytes as by apply_chat_template of transformers with add_generation_prompt. Any other template is
 * an error.
 *
 *     chat_format format;
 *     if (!chat_open(&format, tokenizer_config, chat_template, NULL)) puts(format.error);
 *     char *text = chat_render(&format, messages, n);   free it; NULL: format.error
 *     chat_close(&format);
 *
 * For a model that learns from conversations, chat_render_answers also says where the answers stand
 * in the text. Needs cJSON. */
#ifndef LLM_CHAT_H
#define LLM_CHAT_H

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* CHAT_API marks the functions that a program may call. */
#if defined(__GNUC__)
#define CHAT_API __attribute__((unused)) static
#else
#define CHAT_API static
#endif

typedef enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT } chat_role;

typedef struct chat_message {
    chat_role role;
    const char *text;
} chat_message;

/* Bytes [begin, end) of an answer in the text of a conversation: from where the model begins to
 * write, to the end of the string that ends its turn. */
typedef struct chat_span {
    size_t begin, end;
} chat_span;

/* Where a template puts the conversation's system message. */
typedef enum chat_place {
    CHAT_OWN,      /* the system message stands alone, like the other messages */
    CHAT_NOWHERE,  /* a system message is an error */
    CHAT_IN_FIRST, /* the system message is put into the user's first message, before its text */
    CHAT_IN_LAST   /* the system message is put into the last message, if that is the user's */
} chat_place;

/* Flags of chat_style.changes: for which roles white space is stripped at both ends of a message's
 * text, and other changes to texts. */
enum {
    CHAT_TRIM_SYSTEM = 1 << CHAT_SYSTEM,
    CHAT_TRIM_USER = 1 << CHAT_USER,
    CHAT_TRIM_ASSISTANT = 1 << CHAT_ASSISTANT,
    CHAT_TRIM = 7, /* white space is stripped for all roles */
    /* CHAT_IN_FIRST: the system message and the user's text are joined first, then stripped */
    CHAT_TRIM_JOINED = 8,
    /* an answer loses its text up to the last </think>, unless the model is trained on it */
    CHAT_NO_THOUGHTS = 16,
    CHAT_EOS_LAST = 32 /* {eos} follows the last message of a conversation that a model learns */
};

/* How a template renders messages. {bos}, {eos} and {today} in the strings stand for the model's
 * tokens and the date. */
typedef struct chat_style {
    const char *name;
    uint64_t texts[2];        /* chat_hash of the templates that this style renders; 0: none */
    const char *start;        /* text before all messages */
    const char *around[3][2]; /* [role][0] comes before a message's text, [role][1] after it */
    const char *prompt;       /* text after the last message, after which the model writes its
                               * answer; around[CHAT_ASSISTANT][0] begins with it */
    const char *usual;        /* system message if the conversation has none; NULL: none */
    chat_place place;
    int changes; /* how messages' texts are changed: flags, CHAT_TRIM_SYSTEM ... */
} chat_style;

#define CHATML                                                                                     \
    {                                                                                              \
        {"<|im_start|>system\n", "<|im_end|>\n"}, {"<|im_start|>user\n", "<|im_end|>\n"}, {        \
            "<|im_start|>assistant\n", "<|im_end|>\n"                                              \
        }                                                                                          \
    }
#define CHATML_PROMPT "<|im_start|>assistant\n"
#define CHAT_HEADER(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
#define CHAT_LLAMA3(knows)                                                                         \
    {                                                                                              \
        {CHAT_HEADER("system") knows, "<|eot_id|>"}, {CHAT_HEADER("user"), "<|eot_id|>"}, {        \
            CHAT_HEADER("assistant"), "<|eot_id|>"                                                 \
        }                                                                                          \
    }

static const chat_style chat_styles[] = {
    {"none", {0, 0}, "", {{"", ""}, {"", ""}, {"", ""}}, "", NULL, CHAT_OWN, 0},
    {"chatml", {0x88bf4138d5c826f0, 0x773d13e188afc917}, "", CHATML, CHATML_PROMPT, NULL, CHAT_OWN,
     0},
    {"chatml-bos", {0x89bcbd75ce6a3d28, 0x6026a4efc1063551}, "{bos}", CHATML, CHATML_PROMPT, NULL,
     CHAT_OWN, 0},
    {"smollm2", {0x45ec583d4d25bc3a, 0}, "", CHATML, CHATML_PROMPT,
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face", CHAT_OWN, 0},
    {"qwen1.5", {0xc867da37c989d41f, 0}, "", CHATML, CHATML_PROMPT, "You are a helpful assistant",
     CHAT_OWN, 0},
    {"qwen2", {0x8a87094e0e1e24c5, 0}, "", CHATML, CHATML_PROMPT, "You are a helpful assistant.",
     CHAT_OWN, 0},
    {"qwen2.5", {0x11d394755cef9355, 0}, "", CHATML, CHATML_PROMPT,
     "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", CHAT_OWN, 0},
    {"qwen3", {0xabb815b933a4981a, 0x521e84e1430005c3}, "", CHATML, CHATML_PROMPT, NULL, CHAT_OWN,
     CHAT_NO_THOUGHTS},
    {"qwen3-instruct", {0xe62b0eb869d628c3, 0}, "", CHATML, CHATML_PROMPT, NULL, CHAT_OWN, 0},
    {"llama2", {0x0287f57ff3522b77, 0x4d1512049817743d}, "",
     {{"<<SYS>>\n", "\n<</SYS>>\n\n"}, {"{bos}[INST] ", " [/INST]"}, {" ", " {eos}"}},
     "", NULL, CHAT_IN_FIRST, CHAT_TRIM_USER | CHAT_TRIM_ASSISTANT | CHAT_TRIM_JOINED},
    {"llama3", {0x0e60067a5537498e, 0x74891e390e614ae2}, "{bos}", CHAT_LLAMA3(""),
     CHAT_HEADER("assistant"), NULL, CHAT_OWN, CHAT_TRIM},
    {"llama3.1", {0x4fd30286bc0da17c, 0}, "{bos}",
     CHAT_LLAMA3("Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"),
     CHAT_HEADER("assistant"), "", CHAT_OWN, CHAT_TRIM},
    {"llama3.2", {0x1a6da26e3aef1b34, 0}, "{bos}",
     CHAT_LLAMA3("Cutting Knowledge Date: December 2023\nToday Date: {today}\n\n"),
     CHAT_HEADER("assistant"), "", CHAT_OWN, CHAT_TRIM},
    {"mistral-v0.1", {0xc730acc029ce6ee0, 0}, "{bos}",
     {{"", ""}, {"[INST] ", " [/INST]"}, {"", "{eos} "}}, "", NULL, CHAT_NOWHERE, 0},
    {"mistral-v0.2", {0x8c734b90b4f8d84d, 0}, "{bos}",
     {{"", ""}, {"[INST] ", " [/INST]"}, {"", "{eos}"}}, "", NULL, CHAT_NOWHERE, 0},
    {"mistral-v1", {0xd99e5b4469be13b3, 0}, "{bos}",
     {{"", "\n\n"}, {" [INST] ", " [/INST]"}, {" ", "{eos}"}}, "", NULL, CHAT_IN_FIRST, 0},
    {"mistral-v3", {0x09eb1999b1fcf65f, 0}, "{bos}",
     {{"", "\n\n"}, {"[INST] ", "[/INST]"}, {" ", "{eos}"}}, "", NULL, CHAT_IN_LAST,
     CHAT_TRIM_ASSISTANT},
    {"mistral-nemo", {0xf1784176fabceb43, 0}, "{bos}",
     {{"", "\n\n"}, {"[INST]", "[/INST]"}, {"", "{eos}"}}, "", NULL, CHAT_IN_LAST, 0},
    {"mistral-v7", {0x5b3474c6de5e5709, 0}, "{bos}",
     {{"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}, {"[INST]", "[/INST]"}, {"", "{eos}"}},
     "", NULL, CHAT_OWN, 0},
    {"gemma", {0x5c10ee65212d93b3, 0}, "{bos}",
     {{"", ""}, {"<start_of_turn>user\n", "<end_of_turn>\n"},
      {"<start_of_turn>model\n", "<end_of_turn>\n"}},
     "<start_of_turn>model\n", NULL, CHAT_NOWHERE, CHAT_TRIM},
    {"gemma3", {0xd19b6ff3a49deea5, 0}, "{bos}",
     {{"", "\n\n"}, {"<start_of_turn>user\n", "<end_of_turn>\n"},
      {"<start_of_turn>model\n", "<end_of_turn>\n"}},
     "<start_of_turn>model\n", NULL, CHAT_IN_FIRST, CHAT_TRIM_USER | CHAT_TRIM_ASSISTANT},
    {"zephyr", {0xcd8b49000db02c2c, 0}, "",
     {{"<|system|>\n", "{eos}\n"}, {"<|user|>\n", "{eos}\n"}, {"<|assistant|>\n", "{eos}\n"}},
     "<|assistant|>\n", NULL, CHAT_OWN, 0},
    {"phi3", {0xecebdb26677c663d, 0xcf278cde387a54c8}, "",
     {{"<|system|>\n", "<|end|>\n"}, {"<|user|>\n", "<|end|>\n"},
      {"<|assistant|>\n", "<|end|>\n"}},
     "<|assistant|>\n", NULL, CHAT_OWN, CHAT_EOS_LAST},
    {"granite3", {0x0f0e22051160bcb0, 0}, "",
     {{"<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"},
      {"<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"},
      {"<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"}},
     "<|start_of_role|>assistant<|end_of_role|>", NULL, CHAT_OWN, 0}};

#undef CHATML
#undef CHATML_PROMPT
#undef CHAT_HEADER
#undef CHAT_LLAMA3

/* A style, with the special tokens of a model and today's date. */
typedef struct chat_format {
    const chat_style *style;
    char *bos, *eos; /* texts of the bos and eos tokens; NULL: the model has none */
    char today[32];
    char error[768];
} chat_format;

/* -- a text that grows, and white space --------------------------------------- */

/* A buffer that grows. at becomes NULL, and stays so, when there is not enough memory. */
typedef struct chat_text {
    char *at;
    size_t length, room;
} chat_text;

static void chat_append(chat_text *text, const char *more, size_t n) {
    if (text->length + n + 1 > text->room) {
        const size_t room = 2 * (text->length + n) + 64;
        char *at = text->room && !text->at ? NULL : (char *)realloc(text->at, room);
        if (!at) free(text->at);
        text->at = at;
        text->room = room;
    }
    if (!text->at) return;
    memcpy(text->at + text->length, more, n);
    text->length += n;
    text->at[text->length] = 0;
}

/* Appends a string of a chat_style, with {bos}, {eos} and {today} replaced by their values. */
static void chat_fill(chat_text *text, const chat_format *format, const char *from) {
    const struct {
        const char *name, *value;
    } all[] = {{"{bos}", format->bos}, {"{eos}", format->eos}, {"{today}", format->today}};
    while (*from) {
        size_t n = 1, i = 0;
        while (i < 3 && strncmp(from, all[i].name, strlen(all[i].name)) != 0) i++;
        if (i == 3) {
            n += strcspn(from + 1, "{");
            chat_append(text, from, n);
        } else {
            n = strlen(all[i].name);
            if (all[i].value) chat_append(text, all[i].value, strlen(all[i].value));
        }
        from += n;
    }
}

/* Returns the length in bytes of the white space character (as Python's str.isspace defines it)
 * with which the n bytes of UTF-8 at `at` begin; 0: they begin with none. */
static size_t chat_space(const unsigned char *at, size_t n) {
    const unsigned code = n > 1 && (at[0] & 0xe0) == 0xc0 ? (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu)
                          : n > 2 && (at[0] & 0xf0) == 0xe0
                              ? (at[0] & 0x0fu) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu)
                              : 0;
    if (n > 0 && at[0] < 0x80) return (at[0] >= 9 && at[0] <= 13) || (at[0] >= 28 && at[0] <= 32);
    if (code == 0x85 || code == 0xa0) return 2;
    return code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 ||
                   code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000
               ? 3
               : 0;
}

/* Strips white space at both ends of *text, n bytes: moves *text, and returns the new length. */
static size_t chat_trim(const char **text, size_t n) {
    const unsigned char *at = (const unsigned char *)*text;
    size_t step, end = 0;
    for (; (step = chat_space(at, n)) > 0; n -= step) at += step;
    for (size_t i = 0; i < n; i += step > 0 ? step : 1) {
        step = chat_space(at + i, n - i);
        if (step == 0) end = i + 1;
    }
    *text = (const char *)at;
    return end;
}

/* -- rendering a conversation ------------------------------------------------- */

/* Appends the text of a message, changed as style->changes says: without thoughts, stripped. */
static void chat_content(chat_text *text, const chat_style *style, const chat_message *message) {
    const char *at = message->text, *thoughts = at;
    if (message->role == CHAT_ASSISTANT && (style->changes & CHAT_NO_THOUGHTS)) {
        while ((thoughts = strstr(thoughts, "</think>")) != NULL) at = thoughts += 8;
        if (at != message->text) at += strspn(at, "\n");
    }
    const int trim = style->changes >> message->role & 1;
    const size_t n = trim ? chat_trim(&at, strlen(at)) : strlen(at);
    chat_append(text, at, n);
}

/* Appends the system message and the text of a message of the user as one text. */
static void chat_joined(chat_text *text, const chat_format *format, const chat_message *system,
                        const chat_message *user) {
    const chat_style *style = format->style;
    const size_t from = text->length;
    chat_fill(text, format, style->around[CHAT_SYSTEM][0]);
    chat_content(text, style, system);
    chat_fill(text, format, style->around[CHAT_SYSTEM][1]);
    if (!(style->changes & CHAT_TRIM_JOINED)) {
        chat_content(text, style, user);
        return;
    }
    chat_append(text, user->text, strlen(user->text));
    if (!text->at) return;
    const char *at = text->at + from;
    const size_t n = chat_trim(&at, text->length - from);
    memmove(text->at + from, at, n);
    text->at[text->length = from + n] = 0;
}

/* Appends an answer that the model is trained on, in a style with CHAT_NO_THOUGHTS: its thoughts,
 * which may be empty, between <think> and </think>, then what follows its last </think>. */
static void chat_thoughts(chat_text *text, const char *answer) {
    const char *end = strstr(answer, "</think>"), *from = answer, *at = answer;
    size_t n = end ? (size_t)(end - answer) : 0;
    while (n > 0 && answer[n - 1] == '\n') n--;
    end = answer + n;
    while ((at = strstr(at, "<think>")) != NULL && at + 7 <= end) from = at += 7;
    while (from < end && *from == '\n') from++;
    chat_append(text, "<think>\n", 8);
    chat_append(text, from, (size_t)(end - from));
    chat_append(text, "\n</think>\n\n", 11);
    for (at = answer; (at = strstr(at, "</think>")) != NULL;) answer = at += 8;
    answer += strspn(answer, "\n");
    chat_append(text, answer, strlen(answer));
}

/* Appends a message between the strings of its role (style->around). system: the system message to
 * join with its text; NULL: none. learnt: 1 for an answer that the model is trained on. Returns the
 * index in `text` at which the model begins to write, if the message is an answer. */
static size_t chat_turn(chat_text *text, const chat_format *format, const chat_message *system,
                        const chat_message *message, int learnt) {
    const chat_style *style = format->style;
    const char *const *around = style->around[message->role];
    const size_t begin = text->length + strlen(style->prompt);
    chat_fill(text, format, around[0]);
    if (system) chat_joined(text, format, system, message);
    else if (learnt && (style->changes & CHAT_NO_THOUGHTS)) chat_thoughts(text, message->text);
    else chat_content(text, style, message);
    chat_fill(text, format, around[1]);
    if (learnt && !*around[1]) chat_fill(text, format, "{eos}");
    return begin;
}

/* Renders a conversation: if spans is NULL, as chat_render does, up to where the next answer
 * begins; else as chat_render_answers does. */
static char *chat_write(chat_format *format, const chat_message *messages, size_t n, size_t first,
                        chat_span *spans) {
    const chat_style *style = format->style;
    const chat_message usual = {CHAT_SYSTEM, style->usual};
    const chat_message *system = n > 0 && messages->role == CHAT_SYSTEM ? messages : NULL;
    const size_t begin = system != NULL;
    size_t last = n; /* CHAT_IN_LAST: the system message is joined with messages[last - 1] */
    chat_text text = {NULL, 0, 0};
    if (system && style->place == CHAT_NOWHERE) {
        snprintf(format->error, sizeof format->error, "the template %s takes no system message",
                 style->name);
        return NULL;
    }
    while (spans && last > begin && messages[last - 1].role != CHAT_USER) last--;
    if (!system && style->usual) system = &usual;
    chat_fill(&text, format, style->start);
    if (system && style->place == CHAT_OWN) (void)chat_turn(&text, format, NULL, system, 0);
    for (size_t i = begin; i < n; i++) {
        const chat_message *message = &messages[i];
        const int joins = system && message->role == CHAT_USER &&
                          ((style->place == CHAT_IN_FIRST && i == begin) ||
                           (style->place == CHAT_IN_LAST && i + 1 == last));
        const int learnt = spans && message->role == CHAT_ASSISTANT && i >= first;
        const size_t at = chat_turn(&text, format, joins ? system : NULL, message, learnt);
        if (spans && i + 1 == n && (style->changes & CHAT_EOS_LAST))
            chat_fill(&text, format, "{eos}");
        if (learnt) {
            spans[i].begin = at;
            spans[i].end = text.length;
        }
    }
    if (!spans) chat_fill(&text, format, style->prompt);
    chat_append(&text, "", 0);
    if (!text.at) snprintf(format->error, sizeof format->error, "not enough memory");
    return text.at;
}

/* Renders a conversation, up to where the next answer begins. The system message, if any, is the
 * first message; after it, user and assistant take turns. Returns the text, to be passed to free();
 * NULL: format->error says why not. */
CHAT_API char *chat_render(chat_format *format, const chat_message *messages, size_t n) {
    return chat_write(format, messages, n, n, NULL);
}

/* Renders a whole conversation, to train a model on the answers among messages[first] and those
 * after it. spans: an array of n; spans[i] is set if messages[i] is such an answer. The text is
 * that of apply_chat_template without add_generation_prompt, but for three changes: a template that
 * shows thoughts in the last answer alone shows them in all answers to train on, as TRL's training
 * templates do; one that puts the system message into the last message puts it into the user's last
 * one; and answers of style "none" end with the eos token. Returns as chat_render. */
CHAT_API char *chat_render_answers(chat_format *format, const chat_message *messages, size_t n,
                                   size_t first, chat_span *spans) {
    return chat_write(format, messages, n, first, spans);
}

/* Returns the token that ends an answer, as text, to be passed to free(); "": the style has none;
 * NULL: not enough memory. */
CHAT_API char *chat_end(const chat_format *format) {
    chat_text text = {NULL, 0, 0};
    const char *at;
    chat_fill(&text, format, format->style->around[CHAT_ASSISTANT][1]);
    chat_append(&text, "", 0);
    at = text.at;
    if (!at) return NULL;
    const size_t n = chat_trim(&at, text.length);
    memmove(text.at, at, n);
    text.at[n] = 0;
    return text.at;
}

/* -- which template a model has ------------------------------------------------ */

/* Returns the FNV-1a hash of a template's text. A newline written as a backslash and an n, as in
 * JSON within JSON, counts as a newline; a newline at the end of the text is left out, as in
 * Jinja. */
static uint64_t chat_hash(const char *text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text; text++) {
        const int escaped = text[0] == '\\' && text[1] == 'n';
        if (text[0] == '\n' && !text[1]) break;
        hash = (hash ^ (escaped ? '\n' : (unsigned char)*text)) * 0x100000001b3u;
        text += escaped;
    }
    return hash;
}

/* Appends the names of all styles to an error. */
static void chat_names(char *error, size_t size) {
    size_t n = strlen(error);
    for (size_t i = 0; i < sizeof chat_styles / sizeof *chat_styles && n < size; i++)
        n += (size_t)snprintf(error + n, size - n, "%s%s", i ? ", " : "", chat_styles[i].name);
}

/* Sets format->style by its name, or, if that is NULL, by the text of a template. Returns 0 and
 * format->error if it is not known. */
static int chat_choose(chat_format *format, const char *name, const char *text) {
    const uint64_t hash = text ? chat_hash(text) : 0;
    for (size_t i = 0; i < sizeof chat_styles / sizeof *chat_styles; i++) {
        const chat_style *style = &chat_styles[i];
        if (name ? strcmp(style->name, name) == 0
                 : text && (style->texts[0] == hash || style->texts[1] == hash))
            format->style = style;
    }
    if (format->style) return 1;
    snprintf(format->error, sizeof format->error, "%s%.60s%s",
             name   ? "--template "
             : text ? "the model's chat template is not known here; give --template none for plain "
                      "text, or one of "
                    : "the model has no chat template; give --template none for plain text, or one "
                      "of ",
             name ? name : "", name ? " is none of " : "");
    chat_names(format->error, sizeof format->error);
    return 0;
}

/* Returns a copy of a special token of tokenizer_config.json: a string, or the string "content" of
 * an object. NULL: there is none, or, with format->error, not enough memory. */
static char *chat_token(chat_format *format, const cJSON *config, const char *key) {
    const cJSON *item = cJSON_GetObjectItem(config, key);
    const char *text = cJSON_GetStringValue(
        cJSON_IsObject(item) ? cJSON_GetObjectItem(item, "content") : item);
    char *copy = text ? (char *)malloc(strlen(text) + 1) : NULL;
    if (text && !copy) snprintf(format->error, sizeof format->error, "not enough memory");
    return copy ? strcpy(copy, text) : NULL;
}

/* Returns the chat template of tokenizer_config.json: a string, or the one named "default" of a
 * list. NULL: there is none. */
static const char *chat_template(const cJSON *config) {
    const cJSON *item = cJSON_GetObjectItem(config, "chat_template"), *one;
    if (!cJSON_IsArray(item)) return cJSON_GetStringValue(item);
    cJSON_ArrayForEach(one, item) {
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(one, "name"));
        if (name && strcmp(name, "default") == 0)
            return cJSON_GetStringValue(cJSON_GetObjectItem(one, "template"));
    }
    return NULL;
}

/* Chooses the style that renders the model's chat template. config, jinja: texts of
 * tokenizer_config.json and chat_template.jinja, each of which may be NULL; the template of the
 * latter has priority. name: the name of a style to use instead; NULL: none. Returns 0 and
 * format->error if no style fits. Call chat_close in either case. */
CHAT_API int chat_open(chat_format *format, const char *config, const char *jinja,
                       const char *name) {
    const time_t now = time(NULL);
    const struct tm *date = localtime(&now);
    errno = 0;
    cJSON *json = config ? cJSON_Parse(config) : NULL;
    const int lacking = config && !json && errno == ENOMEM;
    memset(format, 0, sizeof *format);
    if (lacking) snprintf(format->error, sizeof format->error, "not enough memory");
    if (date) strftime(format->today, sizeof format->today, "%d %b %Y", date);
    format->bos = chat_token(format, json, "bos_token");
    format->eos = chat_token(format, json, "eos_token");
    const int known = !format->error[0] &&
                      chat_choose(format, name, jinja ? jinja : chat_template(json));
    cJSON_Delete(json);
    return known;
}

CHAT_API void chat_close(chat_format *format) {
    free(format->bos);
    free(format->eos);
    memset(format, 0, sizeof *format);
}

#endif

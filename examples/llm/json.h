/* json.h - explains what is wrong with a text that is not JSON, by line and column, and finds a key
 * that an object has twice. cJSON does the parsing; llm_json_explain is called before it, as cJSON
 * accepts some malformed texts. Include tshard.h first; needs cJSON. */
#ifndef LLM_JSON_H
#define LLM_JSON_H

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* LLM_JSON_API marks the functions that a program may call. */
#if defined(__GNUC__)
#define LLM_JSON_API __attribute__((unused)) static
#else
#define LLM_JSON_API static
#endif

/* Parses JSON with cJSON. Returns NULL if that fails: errno is ENOMEM if there is not enough
 * memory, else 0. */
LLM_JSON_API cJSON *llm_parse(const char *text) {
    cJSON *json;
    errno = 0; /* to tell lack of memory (malloc sets ENOMEM) from malformed JSON */
    json = cJSON_Parse(text);
    if (!json && errno != ENOMEM) errno = 0;
    return json;
}

/* LLM_JSON_DEPTH: deepest nesting of brackets that is accepted. LLM_JSON_KEYS: in an object with
 * more keys, llm_json_twice does not look for equal ones. */
enum { LLM_JSON_DEPTH = 500, LLM_JSON_KEYS = 512 };

/* A scan of a JSON text. at: the position in the text; wrong: the first thing that is wrong, as a
 * sentence; NULL: nothing so far. */
typedef struct llm_json_scan {
    const char *at, *wrong;
} llm_json_scan;

static int llm_json_wrong(llm_json_scan *s, const char *what) {
    if (!s->wrong) s->wrong = *s->at ? what : "the text ends here, before its value does";
    return 0;
}

static void llm_json_skip(llm_json_scan *s) {
    s->at += strspn(s->at, " \t\r\n");
}

/* Returns the value of the 4 hexadecimal digits at `at`; -1: there are fewer than 4. */
static int llm_json_unit(const char *at) {
    int unit = 0;
    for (int i = 0; i < 4; i++) {
        const char *const digits = "0123456789abcdefABCDEF", *digit = strchr(digits, at[i]);
        if (!at[i] || !digit) return -1;
        unit = 16 * unit + (int)(digit - digits > 15 ? digit - digits - 6 : digit - digits);
    }
    return unit;
}

/* Moves s->at from the backslash of an escape to the escape's last character. Returns 0 and sets
 * s->wrong if JSON has no such escape. */
static int llm_json_escape(llm_json_scan *s) {
    const char kind = s->at[1];
    const int unit = kind == 'u' ? llm_json_unit(s->at + 2) : 0;
    if (!kind) return 1; /* the text ends after the backslash, which llm_json_string reports */
    if (!strchr("\"\\/bfnrtu", kind) || unit < 0)
        return llm_json_wrong(s, "this is no escape of JSON, and a \\ of the text is written \\\\");
    /* a character above U+FFFF is two escapes: \uD800 to \uDBFF, then \uDC00 to \uDFFF */
    const int pair = unit >= 0xD800 && unit < 0xDC00 && s->at[6] == '\\' && s->at[7] == 'u';
    const int second = pair ? llm_json_unit(s->at + 8) : 0;
    if (unit >= 0xD800 && unit < 0xE000 && (second < 0xDC00 || second > 0xDFFF))
        return llm_json_wrong(s, "this escape is half a character: its other half is missing");
    s->at += kind != 'u' ? 1 : pair ? 11 : 5;
    return 1;
}

/* Moves s->at past a string in double quotes. Returns 0 and sets s->wrong if there is none, or if
 * it has no end. */
static int llm_json_string(llm_json_scan *s) {
    if (*s->at == '\'') return llm_json_wrong(s, "strings of JSON have double quotes");
    if (*s->at != '"') return llm_json_wrong(s, "a string in double quotes is missing here");
    for (s->at++; *s->at != '"'; s->at++) {
        if (*s->at == '\\' && !llm_json_escape(s)) return 0;
        if (!*s->at || *s->at == '\n')
            return llm_json_wrong(s, "a string is not closed before the line ends");
        if ((unsigned char)*s->at < 0x20)
            return llm_json_wrong(s, "a control character in a string is an escape, such as \\t");
    }
    s->at++;
    return 1;
}

/* Moves s->at past a number, true, false or null. Returns 0 and sets s->wrong if none is there. */
static int llm_json_word(llm_json_scan *s) {
    static const char *const words[] = {"true", "false", "null"};
    const size_t n = strcspn(s->at, ",]} \t\r\n:"), digits = strspn(s->at, "+-0123456789.eE");
    const char *sign = s->at + (*s->at == '-');
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (n == strlen(words[i]) && strncmp(s->at, words[i], n) == 0) {
            s->at += n;
            return 1;
        }
    if (strncmp(sign, "Infinity", 8) == 0 || strncmp(s->at, "NaN", 3) == 0)
        return llm_json_wrong(s, "NaN and Infinity are no numbers of JSON");
    if (n > 0 && n == digits) {
        s->at += n;
        return 1;
    }
    if (strncmp(s->at, "True", 4) == 0 || strncmp(s->at, "False", 5) == 0 ||
        strncmp(s->at, "None", 4) == 0)
        return llm_json_wrong(s, "this is Python; JSON has true, false and null");
    if (*s->at == '/' || *s->at == '#') return llm_json_wrong(s, "JSON has no comments");
    return llm_json_wrong(s, "there is no value here");
}

static int llm_json_value(llm_json_scan *s, int depth);

/* Moves s->at past an object (`object` 1) or a list (0), from its opening bracket to the closing
 * one. depth: the number of objects and lists around it. Returns 0 and sets s->wrong if it is
 * malformed. */
static int llm_json_inside(llm_json_scan *s, int object, int depth) {
    const char close = object ? '}' : ']';
    s->at++;
    llm_json_skip(s);
    if (*s->at == close) {
        s->at++;
        return 1;
    }
    for (;;) {
        if (object && *s->at == close)
            return llm_json_wrong(s, "a comma stands before this bracket");
        if (object && !llm_json_string(s)) return 0;
        llm_json_skip(s);
        if (object && *s->at != ':') return llm_json_wrong(s, "a colon is missing here");
        s->at += object;
        if (!llm_json_value(s, depth + 1)) return 0;
        if (*s->at == close) {
            s->at++;
            return 1;
        }
        if (*s->at != ',') return llm_json_wrong(s, "a comma or a bracket is missing here");
        s->at++;
        llm_json_skip(s);
    }
}

static int llm_json_value(llm_json_scan *s, int depth) {
    int ok;
    llm_json_skip(s);
    if (depth > LLM_JSON_DEPTH) return llm_json_wrong(s, "brackets are too deep here");
    ok = *s->at == '{' || *s->at == '[' ? llm_json_inside(s, *s->at == '{', depth)
         : *s->at == '"'                ? llm_json_string(s)
                                        : llm_json_word(s);
    if (ok) llm_json_skip(s);
    return ok;
}

/* Writes what is wrong with a text, such as "line 3, column 7: a colon is missing here", to
 * `sentence`. Returns 1; 0 if nothing is wrong. */
LLM_JSON_API int llm_json_explain(const char *text, char *sentence, size_t size) {
    llm_json_scan s = {text, NULL};
    int line = 1, column = 1;
    if (llm_json_value(&s, 0) && *s.at) (void)llm_json_wrong(&s, "something follows the value");
    if (!s.wrong) return 0;
    for (; text < s.at; text++) {
        column = *text == '\n' ? 1 : column + 1;
        line += *text == '\n';
    }
    (void)snprintf(sentence, size, "line %d, column %d: %s", line, column, s.wrong);
    return 1;
}

/* Returns a key that occurs twice in the object, or in an object within it or its lists, at most 8
 * levels deep; NULL: there is none. The keys of an object with more than LLM_JSON_KEYS, more than
 * configs have, are not compared. depth: 0 for the outermost object. */
LLM_JSON_API const char *llm_json_twice(const cJSON *object, int depth) {
    const cJSON *item, *other;
    const char *found = NULL;
    const int pairs = cJSON_IsObject(object) && cJSON_GetArraySize(object) <= LLM_JSON_KEYS;
    cJSON_ArrayForEach(item, object) {
        for (other = pairs ? item->next : NULL; other; other = other->next)
            if (strcmp(item->string, other->string) == 0) return item->string;
        if (depth < 8) found = llm_json_twice(item, depth + 1); /* NULL for a number or a string */
        if (found) return found;
    }
    return NULL;
}

#endif

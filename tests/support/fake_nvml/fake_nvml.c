/*
 * fake_nvml.c - a stand-in for the NVIDIA Management Library, for tests on machines without a GPU.
 *
 * Copyright (c) the project's authors. Permission is granted, free of charge, to anyone to use, copy,
 * change and pass on this file, in source or compiled form, for any purpose, as long as this notice stays
 * in the source. It comes as it is, with no warranty of any kind.
 *
 * Written from the public NVML API: function names, enum values and struct layouts as the nvidia-ml-py
 * package declares them. No NVIDIA code is used.
 *
 * Build:   gcc -std=c11 -O2 -Wall -Wextra -shared -fPIC -pthread -fvisibility=hidden \
 *              -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 * Use:     LD_LIBRARY_PATH=<folder of the .so> FAKE_NVML_STATE=<state file> python your_monitor.py
 *          or, inside a running process before pynvml.nvmlInit():
 *          ctypes.CDLL("<folder>/libnvidia-ml.so.1") and os.environ["FAKE_NVML_STATE"] = "<state file>"
 *          (the loader then answers the name libnvidia-ml.so.1 with the copy already loaded).
 *
 * The state file
 * --------------
 * Plain text, one directive a line, read again at the next call whenever its size, time stamp or inode
 * changed, by every process that loaded the library. Later lines override earlier ones, so a test may just
 * append a line to change the world; it may also replace the file (write a new one, then rename it over).
 * A last line without its newline is not read yet. '#' starts a comment line. A value with blanks is put in
 * double quotes. Unknown directives and keys are errors: nvmlInit then answers INVALID_ARGUMENT, and the
 * line is named on stderr. FAKE_NVML_STATE unset or unreadable: nvmlInit answers DRIVER_NOT_LOADED.
 *
 *   driver VERSION              nvmlSystemGetDriverVersion                           (default 575.57.08)
 *   cuda NUMBER                 nvmlSystemGetCudaDriverVersion, 12090 is 12.9        (default 12090)
 *   gpu UUID [key=value ...]    adds a device (index = order of first appearance) or changes its keys:
 *     name=TEXT                 (default "Fake GPU")       serial=TEXT
 *     bus=DDDD:BB:DD.F          PCI bus id                 minor=N      /dev/nvidiaN   (default: index)
 *     state=ok|lost|reset|unknown|gone
 *                               lost, reset, unknown: every call for this device answers GPU_IS_LOST,
 *                               RESET_REQUIRED or UNKNOWN. gone: the device is not enumerated any more
 *                               (count shrinks, later indexes move up; old handles answer GPU_IS_LOST).
 *     mem_total=MIB  mem_used=MIB  mem_reserved=MIB        (default 81920, 0, 0)
 *     util=PERCENT  util_mem=PERCENT  temp=CELSIUS  fan=PERCENT
 *     power=MILLIWATT  power_limit=MILLIWATT               (default 60000, 700000)
 *     sm_clock=MHZ  mem_clock=MHZ  pstate=N
 *     throttle=MASK             nvmlClocksEventReason* bits, 0x.. allowed
 *     ecc=CURRENT,PENDING       ECC mode                   (default 1,1; ecc=none: NOT_SUPPORTED)
 *     ecc_corrected=N  ecc_uncorrected=N  ecc_corrected_total=N  ecc_uncorrected_total=N
 *                               volatile and aggregate counters
 *     remapped=CORRECTABLE,UNCORRECTABLE,PENDING,FAILURE   (remapped=none: NOT_SUPPORTED)
 *     mig=CURRENT,PENDING       (default 0,0; mig=none: NOT_SUPPORTED)
 *     recovery=N                recovery action, field 230 (default 0; recovery=none: NOT_SUPPORTED, as before R570)
 *     parent=UUID  gi=N         makes it a MIG instance of that card: not counted among the devices, found by
 *                               its UUID and under its card (whose mig= must say 1,..); lost when its card is;
 *                               its utilisation is NOT_SUPPORTED; events named for it arrive for the card
 *                               with its GPU instance number
 *     cpus=MASK                 CPU affinity, first 64 CPUs (default all ones)
 *     procs=PID:MIB[,PID:MIB]   compute processes (empty value: none)
 *   event UUID TYPE NUMBER      one event: TYPE is xid, sbe, dbe, pstate, clock, or a 0x.. event type bit;
 *                               NUMBER is the event's data (the XID). Every event set that had registered
 *                               the device for that type before the line appeared gets it once, in order.
 *   fail CALL ERROR [UUID]      CALL answers ERROR, for one device or for all. CALL is the function's name
 *                               without a _vN or WithFlags suffix (nvmlInit, nvmlDeviceGetTemperature, ...) or
 *                               '*'; ERROR is a number or a name without NVML_ERROR_ (LIB_RM_VERSION_MISMATCH,
 *                               DRIVER_NOT_LOADED, GPU_IS_LOST, ...). 'fail CALL off [UUID]' takes it back.
 *   hang CALL MS|forever [UUID] CALL blocks before it answers, as under a hung driver: no signal handler of
 *                               the calling thread runs meanwhile, SIGKILL ends it. 'hang CALL off [UUID]'
 *                               releases callers that are blocked.
 *
 * Example:
 *   driver 575.57.08
 *   gpu GPU-11111111-aaaa-bbbb-cccc-000000000001 name="NVIDIA H100 80GB HBM3" bus=0000:18:00.0 temp=41
 *   gpu GPU-22222222-aaaa-bbbb-cccc-000000000002 name="NVIDIA H100 80GB HBM3" bus=0000:2a:00.0 procs=4242:1024
 * later, appended by the test:
 *   event GPU-11111111-aaaa-bbbb-cccc-000000000001 xid 79
 *   gpu GPU-11111111-aaaa-bbbb-cccc-000000000001 state=lost
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>

#define API __attribute__((visibility("default")))

enum { MAX_GPUS = 64, MAX_RULES = 256, MAX_EVENTS = 65536, MAX_PROCS = 128, MAX_SETS = 256, TEXT = 96 };

/* ---- the public interface: codes and structs ------------------------------------------------------- */

typedef int ret_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16,
    MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "SUCCESS", "Success"},
    {1, "UNINITIALIZED", "Uninitialized"},
    {2, "INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NOT_SUPPORTED", "Not Supported"},
    {4, "NO_PERMISSION", "Insufficient Permissions"},
    {5, "ALREADY_INITIALIZED", "Already Initialized"},
    {6, "NOT_FOUND", "Not Found"},
    {7, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {8, "INSUFFICIENT_POWER", "Insufficient External Power"},
    {9, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {10, "TIMEOUT", "Timeout"},
    {11, "IRQ_ISSUE", "Interrupt Request Issue"},
    {12, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
    {13, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {14, "CORRUPTED_INFOROM", "Corrupted infoROM"},
    {15, "GPU_IS_LOST", "GPU is lost"},
    {16, "RESET_REQUIRED", "GPU requires reset"},
    {17, "OPERATING_SYSTEM", "The operating system has blocked the request."},
    {18, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"},
    {19, "IN_USE", "In use by another client"},
    {20, "MEMORY", "Insufficient Memory"},
    {21, "NO_DATA", "No data"},
    {22, "VGPU_ECC_NOT_SUPPORTED", "vGPU ECC not supported"},
    {23, "INSUFFICIENT_RESOURCES", "Insufficient resources"},
    {24, "FREQ_NOT_SUPPORTED", "Frequency not supported"},
    {25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
    {26, "DEPRECATED", "Deprecated"},
    {27, "NOT_READY", "Not ready"},
    {28, "GPU_NOT_FOUND", "GPU not found"},
    {29, "INVALID_STATE", "Invalid state"},
    {30, "RESET_TYPE_NOT_SUPPORTED", "Reset type not supported"},
    {999, "UNKNOWN", "Unknown Error"},
};

enum { EV_SBE = 1, EV_DBE = 2, EV_PSTATE = 4, EV_XID = 8, EV_CLOCK = 16 };
#define EV_ALL ((uint64_t)(EV_SBE | EV_DBE | EV_PSTATE | EV_XID | EV_CLOCK))
#define NO_INSTANCE 0xFFFFFFFFu

typedef struct gpu gpu_t;
typedef struct { unsigned long long total, free, used; } memory_v1_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned version; unsigned sensor; int temperature; } temperature_v1_t;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency_us;
    int type;                                            /* 1: unsigned int */
    ret_t code;
    union { unsigned number; unsigned long long wide; } value;
} field_t;
enum { FIELD_RECOVERY_ACTION = 230, MAX_MIG = 7 };
typedef struct { unsigned pid; unsigned long long used; } process_v1_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v2_t;
typedef struct { gpu_t *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_data_t;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_t;
#define VERSIONED(type, n) ((unsigned)(sizeof(type) | ((unsigned)(n) << 24)))

/* ---- what the state file says ----------------------------------------------------------------------- */

enum gpu_state { OK, LOST, RESET, BROKEN, GONE };

struct gpu {
    char uuid[TEXT], name[TEXT], serial[30], bus[32], parent[TEXT];       /* parent: "" unless it is a MIG instance */
    enum gpu_state state;
    unsigned long long mem_total, mem_used, mem_reserved, throttle, cpus;
    unsigned long long ecc_count[2][2];                  /* [volatile, aggregate][corrected, uncorrected] */
    unsigned util, util_mem, temp, fan, power, power_limit, sm_clock, mem_clock, pstate, minor;
    unsigned ecc[2], remapped[4], mig[2], recovery, instance;
    bool has_ecc, has_remapped, has_mig, has_recovery;
    unsigned n_procs;
    struct { unsigned pid; unsigned long long mib; } procs[MAX_PROCS];
};

struct rule { char call[TEXT], uuid[TEXT]; bool hang; long long value; };      /* hang: ms, -1 for ever */
struct event { gpu_t *gpu; uint64_t type, data; };
struct event_set { bool used; uint64_t types[MAX_GPUS]; size_t from[MAX_GPUS], next; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gpu_t gpus[MAX_GPUS];              /* a slot, so a handle, stays with its UUID for the process's life */
static unsigned n_slots;
static unsigned order[MAX_GPUS], n_gpus;  /* slots the file names now, in the file's order */
static struct rule rules[MAX_RULES];
static unsigned n_rules;
static struct event events[MAX_EVENTS];
static size_t n_events;
static struct event_set sets[MAX_SETS];
static char driver_version[80];
static int cuda_version, init_count;
static bool file_ok, file_bad;
static struct stat seen;

static void defaults(gpu_t *g, unsigned index)
{
    char uuid[TEXT];
    memcpy(uuid, g->uuid, sizeof uuid);
    *g = (gpu_t){.mem_total = 81920, .power = 60000, .power_limit = 700000, .temp = 35, .sm_clock = 1980, .mem_clock = 2619,
                 .cpus = ~0ULL, .minor = index, .ecc = {1, 1}, .has_ecc = true, .has_remapped = true,
                 .has_mig = true, .has_recovery = true};
    memcpy(g->uuid, uuid, sizeof uuid);
    strcpy(g->name, "Fake GPU");
    snprintf(g->serial, sizeof g->serial, "FAKE%06u", index);
    snprintf(g->bus, sizeof g->bus, "0000:%02x:00.0", (index + 1) & 0xFF);
}

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

/* next blank-separated word, double quotes kept together and removed; NULL at the end */
static char *word(char **rest)
{
    char *in = *rest, *out, *start;
    while (isspace((unsigned char)*in)) in++;
    if (!*in) return NULL;
    start = out = in;
    for (bool quoted = false; *in && (quoted || !isspace((unsigned char)*in)); in++) {
        if (*in == '"') quoted = !quoted;
        else *out++ = *in;
    }
    *rest = *in ? in + 1 : in;
    *out = 0;
    return start;
}

static bool number(const char *s, unsigned long long *n)
{
    char *end;
    errno = 0;
    *n = strtoull(s, &end, 0);
    return *s && *s != '-' && !*end && !errno;
}

static bool unsigned_of(const char *s, unsigned *u)
{
    unsigned long long n;
    if (!number(s, &n) || n > 0xFFFFFFFFu) return false;
    *u = (unsigned)n;
    return true;
}

/* "1,2,3" into exactly n numbers; "none" clears *has */
static bool list(char *s, unsigned *to, unsigned n, bool *has)
{
    char *save = NULL;
    if ((*has = strcmp(s, "none") != 0) == false) return true;
    for (unsigned i = 0; i < n; i++, s = NULL) {
        char *part = strtok_r(s, ",", &save);
        if (!part || !unsigned_of(part, &to[i])) return false;
    }
    return !strtok_r(NULL, ",", &save);
}

static bool set_procs(gpu_t *g, char *s)
{
    char *save = NULL;
    g->n_procs = 0;
    for (char *p = strtok_r(s, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        char *colon = strchr(p, ':');
        if (!colon || g->n_procs == MAX_PROCS) return false;
        *colon = 0;
        if (!unsigned_of(p, &g->procs[g->n_procs].pid) || !number(colon + 1, &g->procs[g->n_procs].mib)) return false;
        g->n_procs++;
    }
    return true;
}

static bool set_key(gpu_t *g, const char *key, char *value)
{
    static const char *const STATES[] = {"ok", "lost", "reset", "unknown", "gone"};
    const struct { const char *key; unsigned *to; } small[] = {
        {"util", &g->util}, {"util_mem", &g->util_mem}, {"temp", &g->temp}, {"fan", &g->fan}, {"power", &g->power},
        {"power_limit", &g->power_limit}, {"sm_clock", &g->sm_clock}, {"mem_clock", &g->mem_clock},
        {"pstate", &g->pstate}, {"minor", &g->minor}, {"gi", &g->instance}};
    const struct { const char *key; unsigned long long *to; } big[] = {
        {"mem_total", &g->mem_total}, {"mem_used", &g->mem_used}, {"mem_reserved", &g->mem_reserved},
        {"throttle", &g->throttle}, {"cpus", &g->cpus},
        {"ecc_corrected", &g->ecc_count[0][0]}, {"ecc_uncorrected", &g->ecc_count[0][1]},
        {"ecc_corrected_total", &g->ecc_count[1][0]}, {"ecc_uncorrected_total", &g->ecc_count[1][1]}};

    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        if (!strcmp(key, small[i].key)) return unsigned_of(value, small[i].to);
    for (size_t i = 0; i < sizeof big / sizeof *big; i++)
        if (!strcmp(key, big[i].key)) return number(value, big[i].to);
    if (!strcmp(key, "state")) {
        for (unsigned i = 0; i < sizeof STATES / sizeof *STATES; i++)
            if (!strcmp(value, STATES[i])) { g->state = (enum gpu_state)i; return true; }
        return false;
    }
    if (!strcmp(key, "name")) { copy(g->name, sizeof g->name, value); return true; }
    if (!strcmp(key, "serial")) { copy(g->serial, sizeof g->serial, value); return true; }
    if (!strcmp(key, "bus")) {
        unsigned a, b, c, d;
        copy(g->bus, sizeof g->bus, value);
        return sscanf(value, "%x:%x:%x.%x", &a, &b, &c, &d) == 4;
    }
    if (!strcmp(key, "parent")) { copy(g->parent, sizeof g->parent, value); return true; }
    if (!strcmp(key, "recovery")) return list(value, &g->recovery, 1, &g->has_recovery);
    if (!strcmp(key, "ecc")) return list(value, g->ecc, 2, &g->has_ecc);
    if (!strcmp(key, "remapped")) return list(value, g->remapped, 4, &g->has_remapped);
    if (!strcmp(key, "mig")) return list(value, g->mig, 2, &g->has_mig);
    if (!strcmp(key, "procs")) return set_procs(g, value);
    return false;
}

static gpu_t *named(const char *uuid)                    /* a device the file names now */
{
    for (unsigned i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[order[i]].uuid, uuid)) return &gpus[order[i]];
    return NULL;
}

static bool line_gpu(char *rest)
{
    char *uuid = word(&rest), *w;
    if (!uuid) return false;
    gpu_t *g = named(uuid);
    if (!g) {
        unsigned slot = 0;
        while (slot < n_slots && strcmp(gpus[slot].uuid, uuid)) slot++;
        if (slot == MAX_GPUS || n_gpus == MAX_GPUS) return false;
        g = &gpus[slot];
        if (slot == n_slots) { copy(g->uuid, sizeof g->uuid, uuid); n_slots++; }
        defaults(g, n_gpus);
        order[n_gpus++] = slot;
    }
    while ((w = word(&rest))) {
        char *eq = strchr(w, '=');
        if (!eq) return false;
        *eq = 0;
        if (!set_key(g, w, eq + 1)) return false;
    }
    return true;
}

static bool line_event(char *rest)
{
    static const struct { const char *name; uint64_t type; } TYPES[] = {
        {"xid", EV_XID}, {"sbe", EV_SBE}, {"dbe", EV_DBE}, {"pstate", EV_PSTATE}, {"clock", EV_CLOCK}};
    char *uuid = word(&rest), *type = word(&rest), *data = word(&rest);
    struct event e = {0};
    unsigned long long n;
    if (!data || !(e.gpu = named(uuid)) || n_events == MAX_EVENTS) return false;
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (!strcmp(type, TYPES[i].name)) e.type = TYPES[i].type;
    if (!e.type) { if (!number(type, &n)) return false; e.type = n; }
    if (!number(data, &n)) return false;
    e.data = n;
    events[n_events++] = e;
    return true;
}

static bool error_code(const char *s, long long *code)
{
    unsigned long long n;
    if (number(s, &n)) { *code = (long long)n; return true; }
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (!strcmp(s, ERRORS[i].name)) { *code = ERRORS[i].code; return true; }
    return false;
}

static bool line_rule(char *rest, bool hang)
{
    char *call = word(&rest), *what = word(&rest), *uuid = word(&rest);
    struct rule r = {.hang = hang};
    unsigned long long ms;
    if (!what) return false;
    copy(r.call, sizeof r.call, call);
    copy(r.uuid, sizeof r.uuid, uuid ? uuid : "");
    unsigned kept = 0;                                   /* a new rule replaces the one for the same call and device */
    for (unsigned i = 0; i < n_rules; i++)
        if (rules[i].hang != hang || strcmp(rules[i].call, r.call) || strcmp(rules[i].uuid, r.uuid)) rules[kept++] = rules[i];
    n_rules = kept;
    if (!strcmp(what, "off")) return true;
    if (hang && !strcmp(what, "forever")) r.value = -1;
    else if (hang) { if (!number(what, &ms)) return false; r.value = (long long)ms; }
    else if (!error_code(what, &r.value)) return false;
    if (n_rules == MAX_RULES) return false;
    rules[n_rules++] = r;
    return true;
}

static bool line_read(char *line)
{
    char *rest = line, *w = word(&rest);
    if (!w || *w == '#') return true;
    if (!strcmp(w, "gpu")) return line_gpu(rest);
    if (!strcmp(w, "event")) return line_event(rest);
    if (!strcmp(w, "fail")) return line_rule(rest, false);
    if (!strcmp(w, "hang")) return line_rule(rest, true);
    char *value = word(&rest);
    if (value && !strcmp(w, "driver")) { copy(driver_version, sizeof driver_version, value); return true; }
    if (value && !strcmp(w, "cuda")) { cuda_version = atoi(value); return true; }
    return false;
}

/* reads the state file again if it changed; the lock is held */
static void refresh(void)
{
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat st;
    FILE *f = path ? fopen(path, "re") : NULL;
    if (!f || fstat(fileno(f), &st)) {
        if (f) fclose(f);
        file_ok = false;
        memset(&seen, 0, sizeof seen);
        return;
    }
    if (file_ok && st.st_ino == seen.st_ino && st.st_dev == seen.st_dev && st.st_size == seen.st_size &&
        st.st_mtim.tv_sec == seen.st_mtim.tv_sec && st.st_mtim.tv_nsec == seen.st_mtim.tv_nsec) {
        fclose(f);
        return;
    }
    file_ok = true;
    file_bad = false;
    seen = st;
    n_gpus = n_rules = 0;
    n_events = 0;
    copy(driver_version, sizeof driver_version, "575.57.08");
    cuda_version = 12090;
    char *line = NULL;
    size_t room = 0;
    ssize_t got;
    unsigned number_of_line = 0;
    while ((got = getline(&line, &room, f)) > 0 && line[got - 1] == '\n') {
        number_of_line++;
        if (!line_read(line)) {
            fprintf(stderr, "fake_nvml: %s:%u: not understood\n", path, number_of_line);
            file_bad = true;
        }
    }
    free(line);
    fclose(f);
}

/* ---- what every call does first ---------------------------------------------------------------------- */

static void nap(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&t, &t) && errno == EINTR) continue;
}

static long long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static const struct rule *rule_for(const char *call, bool hang, const gpu_t *g)
{
    const struct rule *found = NULL;                     /* a rule that names the call wins over '*' */
    for (unsigned i = 0; i < n_rules; i++) {
        const struct rule *r = &rules[i];
        if (r->hang != hang || (*r->uuid && (!g || strcmp(r->uuid, g->uuid)))) continue;
        if (!strcmp(r->call, call)) return r;
        if (!strcmp(r->call, "*") && !found) found = r;
    }
    return found;
}

static bool listed(const gpu_t *g)
{
    for (unsigned i = 0; i < n_gpus; i++)
        if (&gpus[order[i]] == g) return true;
    return false;
}

static bool is_handle(const gpu_t *g) { return g >= gpus && g < gpus + n_slots && ((const char *)g - (const char *)gpus) % sizeof *g == 0; }

static gpu_t *card_of(gpu_t *g)                          /* the card of a MIG instance; of a card, itself */
{
    gpu_t *card = *g->parent ? named(g->parent) : g;
    return card ? card : g;
}

static ret_t state_code(const gpu_t *g)
{
    if (!listed(g)) return GPU_IS_LOST;
    g = card_of((gpu_t *)g);
    switch (g->state) {
    case OK: return SUCCESS;
    case RESET: return RESET_REQUIRED;
    case BROKEN: return UNKNOWN;
    default: return GPU_IS_LOST;
    }
}

/* Takes the lock, obeys hang and fail rules, checks the handle (g may be NULL for calls about no device).
 * SUCCESS: the caller goes on under the lock and must end with leave(). Anything else: already unlocked. */
static ret_t enter(const char *call, const gpu_t *g, bool needs_device)
{
    const struct rule *r;
    long long began = now_ms();
    ret_t code = SUCCESS;
    pthread_mutex_lock(&lock);
    refresh();
    while ((r = rule_for(call, true, is_handle(g) ? g : NULL)) && (r->value < 0 || now_ms() - began < r->value)) {
        pthread_mutex_unlock(&lock);
        nap(10);
        pthread_mutex_lock(&lock);
        refresh();
    }
    if ((r = rule_for(call, false, is_handle(g) ? g : NULL))) code = (ret_t)r->value;
    else if (!init_count && strcmp(call, "nvmlInit")) code = UNINITIALIZED;
    else if (needs_device && !is_handle(g)) code = INVALID_ARGUMENT;
    else if (needs_device) code = state_code(g);
    if (code != SUCCESS) pthread_mutex_unlock(&lock);
    return code;
}

static ret_t leave(ret_t code)
{
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(call, g, needs) do { ret_t e_ = enter(call, g, needs); if (e_ != SUCCESS) return e_; } while (0)
#define NEED(condition) do { if (!(condition)) return leave(INVALID_ARGUMENT); } while (0)

static ret_t put_text(char *to, unsigned size, const char *text)
{
    if (!to) return leave(INVALID_ARGUMENT);
    if (strlen(text) + 1 > size) return leave(INSUFFICIENT_SIZE);
    strcpy(to, text);
    return leave(SUCCESS);
}

/* ---- library and system ------------------------------------------------------------------------------- */

API ret_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    ENTER("nvmlInit", NULL, false);
    if (!file_ok) return leave(DRIVER_NOT_LOADED);
    if (file_bad) return leave(INVALID_ARGUMENT);
    init_count++;
    return leave(SUCCESS);
}
API ret_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API ret_t nvmlInit(void) { return nvmlInitWithFlags(0); }

API ret_t nvmlShutdown(void)
{
    ENTER("nvmlShutdown", NULL, false);
    init_count--;
    return leave(SUCCESS);
}

API const char *nvmlErrorString(ret_t code)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) return ERRORS[i].text;
    return "Unknown Error";
}

API ret_t nvmlSystemGetDriverVersion(char *to, unsigned size)
{
    ENTER("nvmlSystemGetDriverVersion", NULL, false);
    return put_text(to, size, driver_version);
}

API ret_t nvmlSystemGetNVMLVersion(char *to, unsigned size)
{
    ENTER("nvmlSystemGetNVMLVersion", NULL, false);
    char text[96];
    snprintf(text, sizeof text, "12.%s", driver_version);
    return put_text(to, size, text);
}

API ret_t nvmlSystemGetCudaDriverVersion(int *version)
{
    ENTER("nvmlSystemGetCudaDriverVersion", NULL, false);
    NEED(version);
    *version = cuda_version;
    return leave(SUCCESS);
}
API ret_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- enumeration ---------------------------------------------------------------------------------------- */

static bool is_counted(const gpu_t *g) { return g->state != GONE && !*g->parent; }

API ret_t nvmlDeviceGetCount_v2(unsigned *count)
{
    ENTER("nvmlDeviceGetCount", NULL, false);
    NEED(count);
    *count = 0;
    for (unsigned i = 0; i < n_gpus; i++) *count += is_counted(&gpus[order[i]]);
    return leave(SUCCESS);
}
API ret_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

static unsigned index_of(const gpu_t *g)                 /* among those not gone */
{
    unsigned index = 0;
    for (unsigned i = 0; i < n_gpus && &gpus[order[i]] != g; i++) index += is_counted(&gpus[order[i]]);
    return index;
}

static ret_t give(gpu_t *g, gpu_t **handle, ret_t missing)
{
    if (!g || g->state == GONE) return leave(missing);
    ret_t code = state_code(g);
    if (code == SUCCESS) *handle = g;
    return leave(code);
}

API ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **handle)
{
    ENTER("nvmlDeviceGetHandleByIndex", NULL, false);
    NEED(handle);
    for (unsigned i = 0; i < n_gpus; i++)
        if (is_counted(&gpus[order[i]]) && index_of(&gpus[order[i]]) == index) return give(&gpus[order[i]], handle, INVALID_ARGUMENT);
    return leave(INVALID_ARGUMENT);
}
API ret_t nvmlDeviceGetHandleByIndex(unsigned index, gpu_t **handle) { return nvmlDeviceGetHandleByIndex_v2(index, handle); }

API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **handle)
{
    ENTER("nvmlDeviceGetHandleByUUID", NULL, false);
    NEED(uuid && handle);
    return give(named(uuid), handle, NOT_FOUND);
}

API ret_t nvmlDeviceGetHandleBySerial(const char *serial, gpu_t **handle)
{
    ENTER("nvmlDeviceGetHandleBySerial", NULL, false);
    NEED(serial && handle);
    for (unsigned i = 0; i < n_gpus; i++)
        if (!strcmp(gpus[order[i]].serial, serial)) return give(&gpus[order[i]], handle, NOT_FOUND);
    return leave(NOT_FOUND);
}

static void bus_of(gpu_t *g, unsigned part[4]) { sscanf(card_of(g)->bus, "%x:%x:%x.%x", &part[0], &part[1], &part[2], &part[3]); }

API ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, gpu_t **handle)
{
    unsigned want[4] = {0}, have[4];
    ENTER("nvmlDeviceGetHandleByPciBusId", NULL, false);
    NEED(bus_id && handle && sscanf(bus_id, "%x:%x:%x.%x", &want[0], &want[1], &want[2], &want[3]) == 4);
    for (unsigned i = 0; i < n_gpus; i++) {
        bus_of(&gpus[order[i]], have);
        if (!memcmp(want, have, sizeof want)) return give(&gpus[order[i]], handle, NOT_FOUND);
    }
    return leave(NOT_FOUND);
}
API ret_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, gpu_t **handle) { return nvmlDeviceGetHandleByPciBusId_v2(bus_id, handle); }

/* ---- one device: plain values --------------------------------------------------------------------------- */

/* a getter with one result: NAME(device, TYPE *result) */
#define GETTER(NAME, TYPE, EXPRESSION)      \
    API ret_t NAME(gpu_t *g, TYPE *result)  \
    {                                       \
        ENTER(#NAME, g, true);              \
        NEED(result);                       \
        *result = (TYPE)(EXPRESSION);       \
        return leave(SUCCESS);              \
    }

GETTER(nvmlDeviceGetIndex, unsigned, index_of(g))
GETTER(nvmlDeviceGetMinorNumber, unsigned, g->minor)
GETTER(nvmlDeviceGetPowerUsage, unsigned, g->power)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, g->power_limit)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, g->power_limit)
GETTER(nvmlDeviceGetFanSpeed, unsigned, g->fan)
GETTER(nvmlDeviceGetPerformanceState, unsigned, g->pstate)
GETTER(nvmlDeviceGetPersistenceMode, unsigned, 1)
GETTER(nvmlDeviceGetComputeMode, unsigned, 0)
GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned, g->has_mig && g->mig[0] ? MAX_MIG : 0)
GETTER(nvmlDeviceIsMigDeviceHandle, unsigned, *g->parent != 0)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, g->throttle)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, g->throttle)
GETTER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0x1FF)
GETTER(nvmlDeviceGetSupportedEventTypes, unsigned long long, EV_ALL)

API ret_t nvmlDeviceGetUUID(gpu_t *g, char *to, unsigned size)
{
    ENTER("nvmlDeviceGetUUID", g, true);
    return put_text(to, size, g->uuid);
}

API ret_t nvmlDeviceGetName(gpu_t *g, char *to, unsigned size)
{
    ENTER("nvmlDeviceGetName", g, true);
    return put_text(to, size, g->name);
}

API ret_t nvmlDeviceGetSerial(gpu_t *g, char *to, unsigned size)
{
    ENTER("nvmlDeviceGetSerial", g, true);
    return put_text(to, size, g->serial);
}

static unsigned long long mib(unsigned long long n) { return n << 20; }

static unsigned long long mem_free(const gpu_t *g)
{
    unsigned long long taken = g->mem_used + g->mem_reserved;
    return mib(taken < g->mem_total ? g->mem_total - taken : 0);
}

API ret_t nvmlDeviceGetMemoryInfo(gpu_t *g, memory_v1_t *m)
{
    ENTER("nvmlDeviceGetMemoryInfo", g, true);
    NEED(m);
    *m = (memory_v1_t){mib(g->mem_total), mem_free(g), mib(g->mem_used + g->mem_reserved)};   /* v1 counts the reserve as used */
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetMemoryInfo_v2(gpu_t *g, memory_v2_t *m)
{
    ENTER("nvmlDeviceGetMemoryInfo", g, true);
    NEED(m);
    if (m->version != VERSIONED(memory_v2_t, 2)) return leave(ARGUMENT_VERSION_MISMATCH);
    *m = (memory_v2_t){m->version, mib(g->mem_total), mib(g->mem_reserved), mem_free(g), mib(g->mem_used)};
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetUtilizationRates(gpu_t *g, utilization_t *u)
{
    ENTER("nvmlDeviceGetUtilizationRates", g, true);
    NEED(u);
    if (*g->parent) return leave(NOT_SUPPORTED);
    *u = (utilization_t){g->util, g->util_mem};
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetTemperature(gpu_t *g, unsigned sensor, unsigned *celsius)
{
    ENTER("nvmlDeviceGetTemperature", g, true);
    NEED(celsius && sensor == 0);
    *celsius = g->temp;
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetTemperatureV(gpu_t *g, temperature_v1_t *t)
{
    ENTER("nvmlDeviceGetTemperature", g, true);
    NEED(t);
    if (t->version != VERSIONED(temperature_v1_t, 1)) return leave(ARGUMENT_VERSION_MISMATCH);
    NEED(t->sensor == 0);
    t->temperature = (int)g->temp;
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetTemperatureThreshold(gpu_t *g, unsigned which, unsigned *celsius)
{
    static const unsigned AT[] = {95, 92, 95, 90};       /* shutdown, slowdown, memory max, GPU max */
    ENTER("nvmlDeviceGetTemperatureThreshold", g, true);
    NEED(celsius);
    if (which >= sizeof AT / sizeof *AT) return leave(NOT_SUPPORTED);
    *celsius = AT[which];
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetClockInfo(gpu_t *g, unsigned type, unsigned *mhz)
{
    ENTER("nvmlDeviceGetClockInfo", g, true);
    NEED(mhz && type < 4);
    *mhz = type == 2 ? g->mem_clock : g->sm_clock;       /* graphics, SM, memory, video */
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetEccMode(gpu_t *g, unsigned *current, unsigned *pending)
{
    ENTER("nvmlDeviceGetEccMode", g, true);
    NEED(current && pending);
    if (!g->has_ecc) return leave(NOT_SUPPORTED);
    *current = g->ecc[0];
    *pending = g->ecc[1];
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetTotalEccErrors(gpu_t *g, unsigned type, unsigned counter, unsigned long long *count)
{
    ENTER("nvmlDeviceGetTotalEccErrors", g, true);
    NEED(count && type < 2 && counter < 2);
    if (!g->has_ecc || !g->ecc[0]) return leave(NOT_SUPPORTED);
    *count = g->ecc_count[counter][type];
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetRemappedRows(gpu_t *g, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failure)
{
    ENTER("nvmlDeviceGetRemappedRows", g, true);
    NEED(correctable && uncorrectable && pending && failure);
    if (!g->has_remapped) return leave(NOT_SUPPORTED);
    *correctable = g->remapped[0];
    *uncorrectable = g->remapped[1];
    *pending = g->remapped[2];
    *failure = g->remapped[3];
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetMigMode(gpu_t *g, unsigned *current, unsigned *pending)
{
    ENTER("nvmlDeviceGetMigMode", g, true);
    NEED(current && pending);
    if (!g->has_mig) return leave(NOT_SUPPORTED);
    *current = g->mig[0];
    *pending = g->mig[1];
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetMigDeviceHandleByIndex(gpu_t *g, unsigned index, gpu_t **handle)
{
    ENTER("nvmlDeviceGetMigDeviceHandleByIndex", g, true);
    NEED(handle);
    for (unsigned i = 0; i < n_gpus; i++) {
        gpu_t *instance = &gpus[order[i]];
        if (instance->state != GONE && !strcmp(instance->parent, g->uuid) && !index--) return give(instance, handle, NOT_FOUND);
    }
    return leave(NOT_FOUND);
}

API ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu_t *g, gpu_t **handle)
{
    ENTER("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", g, true);
    NEED(handle && *g->parent);
    return give(card_of(g), handle, NOT_FOUND);
}

API ret_t nvmlDeviceGetGpuInstanceId(gpu_t *g, unsigned *id)
{
    ENTER("nvmlDeviceGetGpuInstanceId", g, true);
    NEED(id);
    if (!*g->parent) return leave(NOT_SUPPORTED);
    *id = g->instance;
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetFieldValues(gpu_t *g, int count, field_t *values)
{
    ENTER("nvmlDeviceGetFieldValues", g, true);
    NEED(count > 0 && values);
    for (int i = 0; i < count; i++) {
        bool known = values[i].field == FIELD_RECOVERY_ACTION && card_of(g)->has_recovery;
        values[i].code = known ? SUCCESS : NOT_SUPPORTED;
        values[i].type = 1;
        values[i].value.wide = 0;
        if (known) values[i].value.number = card_of(g)->recovery;
    }
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetCudaComputeCapability(gpu_t *g, int *major, int *minor)
{
    ENTER("nvmlDeviceGetCudaComputeCapability", g, true);
    NEED(major && minor);
    *major = 9;
    *minor = 0;
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetPciInfo_v3(gpu_t *g, pci_t *pci)
{
    unsigned part[4] = {0};
    ENTER("nvmlDeviceGetPciInfo", g, true);
    NEED(pci);
    bus_of(g, part);
    *pci = (pci_t){.domain = part[0], .bus = part[1], .device = part[2], .device_id = 0x233010DE, .subsystem_id = 0x16C110DE};
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.%X", part[0] & 0xFFFF, part[1] & 0xFF, part[2] & 0xFF, part[3] & 0xF);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.%X", part[0], part[1] & 0xFF, part[2] & 0xFF, part[3] & 0xF);
    return leave(SUCCESS);
}

API ret_t nvmlDeviceGetCpuAffinity(gpu_t *g, unsigned n, unsigned long *mask)
{
    ENTER("nvmlDeviceGetCpuAffinity", g, true);
    NEED(n && mask);
    memset(mask, 0, n * sizeof *mask);
    mask[0] = (unsigned long)g->cpus;
    return leave(SUCCESS);
}

/* ---- processes ------------------------------------------------------------------------------------------- */

static ret_t processes(gpu_t *g, unsigned *count, void *to, bool v1)
{
    ENTER("nvmlDeviceGetComputeRunningProcesses", g, true);
    NEED(count);
    unsigned room = *count;
    *count = g->n_procs;
    if (g->n_procs && (!to || room < g->n_procs)) return leave(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < g->n_procs; i++) {
        if (v1) ((process_v1_t *)to)[i] = (process_v1_t){g->procs[i].pid, mib(g->procs[i].mib)};
        else ((process_v2_t *)to)[i] = (process_v2_t){g->procs[i].pid, mib(g->procs[i].mib), NO_INSTANCE, NO_INSTANCE};
    }
    return leave(SUCCESS);
}
API ret_t nvmlDeviceGetComputeRunningProcesses(gpu_t *g, unsigned *n, process_v1_t *to) { return processes(g, n, to, true); }
API ret_t nvmlDeviceGetComputeRunningProcesses_v2(gpu_t *g, unsigned *n, process_v2_t *to) { return processes(g, n, to, false); }
API ret_t nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *g, unsigned *n, process_v2_t *to) { return processes(g, n, to, false); }

static ret_t no_processes(const char *call, gpu_t *g, unsigned *count)
{
    ENTER(call, g, true);
    NEED(count);
    *count = 0;
    return leave(SUCCESS);
}
API ret_t nvmlDeviceGetGraphicsRunningProcesses_v3(gpu_t *g, unsigned *n, process_v2_t *to) { (void)to; return no_processes("nvmlDeviceGetGraphicsRunningProcesses", g, n); }
API ret_t nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu_t *g, unsigned *n, process_v2_t *to) { (void)to; return no_processes("nvmlDeviceGetMPSComputeRunningProcesses", g, n); }

/* ---- events ------------------------------------------------------------------------------------------------ */

static bool is_set(const struct event_set *s) { return s >= sets && s < sets + MAX_SETS && s->used; }

API ret_t nvmlEventSetCreate(struct event_set **set)
{
    ENTER("nvmlEventSetCreate", NULL, false);
    NEED(set);
    for (unsigned i = 0; i < MAX_SETS; i++)
        if (!sets[i].used) {
            sets[i] = (struct event_set){.used = true, .next = n_events};
            *set = &sets[i];
            return leave(SUCCESS);
        }
    return leave(MEMORY);
}

API ret_t nvmlDeviceRegisterEvents(gpu_t *g, unsigned long long types, struct event_set *set)
{
    ENTER("nvmlDeviceRegisterEvents", g, true);
    NEED(is_set(set));
    if (types & ~EV_ALL) return leave(NOT_SUPPORTED);
    if (!set->types[g - gpus]) set->from[g - gpus] = n_events;
    set->types[g - gpus] |= types;
    return leave(SUCCESS);
}

/* the next event for this set, or TIMEOUT for none yet, or GPU_IS_LOST; the lock is held */
static ret_t poll_set(struct event_set *set, event_data_t *to)
{
    if (set->next > n_events) {                          /* the file was replaced by one with fewer events */
        set->next = 0;
        memset(set->from, 0, sizeof set->from);
    }
    while (set->next < n_events) {
        size_t at = set->next++;
        gpu_t *card = card_of(events[at].gpu);
        unsigned slot = (unsigned)(card - gpus), instance = card == events[at].gpu ? NO_INSTANCE : events[at].gpu->instance;
        if (!(set->types[slot] & events[at].type) || at < set->from[slot]) continue;
        *to = (event_data_t){card, events[at].type, events[at].data, instance, card == events[at].gpu ? NO_INSTANCE : 0};
        return SUCCESS;
    }
    for (unsigned slot = 0; slot < n_slots; slot++)
        if (set->types[slot] && state_code(&gpus[slot]) == GPU_IS_LOST) return GPU_IS_LOST;
    return TIMEOUT;
}

API ret_t nvmlEventSetWait_v2(struct event_set *set, event_data_t *to, unsigned timeout_ms)
{
    long long until = now_ms() + timeout_ms;
    ENTER("nvmlEventSetWait", NULL, false);
    for (;;) {
        NEED(is_set(set) && to);
        ret_t code = poll_set(set, to);
        leave(code);
        if (code != TIMEOUT || now_ms() >= until) return code;
        nap(10);
        pthread_mutex_lock(&lock);
        refresh();
    }
}
API ret_t nvmlEventSetWait(struct event_set *set, event_data_t *to, unsigned timeout_ms) { return nvmlEventSetWait_v2(set, to, timeout_ms); }

API ret_t nvmlEventSetFree(struct event_set *set)
{
    ENTER("nvmlEventSetFree", NULL, false);
    NEED(is_set(set));
    set->used = false;
    return leave(SUCCESS);
}

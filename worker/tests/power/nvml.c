/* A management library (libnvidia-ml.so.1) whose GPUs are directories: FAKE_NVML_DIR/0, 1 … with a file for each number. A file
 * that is missing is something that the device does not support. Limits are in milliwatts, use is in percent. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, DRIVER_NOT_LOADED = 9, UNKNOWN = 999 };

typedef struct {
    unsigned gpu, memory;
} Utilization;

static int ordinal(void *device) { return (int)(long)device - 1; }

static void name(char *to, size_t bytes, int gpu, const char *file) {
    const char *directory = getenv("FAKE_NVML_DIR");
    snprintf(to, bytes, "%s/%d/%s", directory ? directory : "", gpu, file);
}

static int has(int gpu, const char *file) {
    char path[4096];
    name(path, sizeof path, gpu, file);
    return access(path, F_OK) == 0;
}

static int number(void *device, const char *file, unsigned *to) {
    char path[4096];
    name(path, sizeof path, ordinal(device), file);
    FILE *from = fopen(path, "r");
    if (from == NULL) return NOT_SUPPORTED;
    int read = fscanf(from, "%u", to);
    fclose(from);
    return read == 1 ? SUCCESS : UNKNOWN;
}

/* Readers never find a part of it. */
static int store(int gpu, const char *file, unsigned value) {
    char path[4096], new[4096];
    name(path, sizeof path, gpu, file);
    name(new, sizeof new, gpu, "new");
    FILE *to = fopen(new, "w");
    if (to == NULL) return UNKNOWN;
    fprintf(to, "%u\n", value);
    return fclose(to) == 0 && rename(new, path) == 0 ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    while (has((int)*count, "limit")) ++*count;
    return SUCCESS;
}

int nvmlInit_v2(void) {
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    return count > 0 ? SUCCESS : DRIVER_NOT_LOADED;
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return has((int)index, "limit") ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned bytes) {
    snprintf(text, bytes, "GPU-%d", ordinal(device));
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *text, unsigned bytes) {
    (void)device;
    snprintf(text, bytes, "Fake");
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *to) { return number(device, "limit", to); }

int nvmlDeviceGetPowerUsage(void *device, unsigned *to) { return number(device, "taken", to); }

int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned *to) { return number(device, "default", to); }

int nvmlDeviceGetPowerManagementLimitConstraints(void *device, unsigned *least, unsigned *most) {
    int outcome = number(device, "least", least);
    return outcome == SUCCESS ? number(device, "most", most) : outcome;
}

/* Counts the readings, so that a test can wait for some. */
int nvmlDeviceGetUtilizationRates(void *device, Utilization *to) {
    unsigned readings = 0;
    to->memory = 0;
    int outcome = number(device, "use", &to->gpu);
    number(device, "readings", &readings);
    store(ordinal(device), "readings", readings + 1);
    return outcome;
}

int nvmlDeviceSetPowerManagementLimit(void *device, unsigned value) {
    unsigned least = 0, most = 0;
    int outcome = nvmlDeviceGetPowerManagementLimitConstraints(device, &least, &most);
    if (outcome != SUCCESS) return outcome;
    if (has(ordinal(device), "forbidden")) return NO_PERMISSION;
    if (value < least || value > most) return INVALID_ARGUMENT;
    return store(ordinal(device), "limit", value);
}

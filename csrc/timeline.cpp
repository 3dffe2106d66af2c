// The simulator for one list of tasks, which comes from Python.
#include "timeline.h"

// Task k runs on stream streams[k] and follows the next counts[k] numbers of `after`. Returns when the last one ends;
// -1 if tasks wait for each other.
FXCOMP_EXPORT double fxcomp_step_time(int32_t size, const int32_t* streams, const double* durations,
                                      const double* demands, const double* beside, const int32_t* counts,
                                      const int32_t* after, double processors) {
    std::vector<int32_t> follows(size + 1, 0);
    for (int32_t k = 0; k < size; ++k) follows[k + 1] = follows[k] + counts[k];
    return fxcomp::Simulator().run({size, streams, durations, demands, beside, follows.data(), after}, processors);
}

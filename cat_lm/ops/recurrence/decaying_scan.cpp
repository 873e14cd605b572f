// The scan of a state that decays, for CPUs (see decaying_scan.py):
//
//   S_t = exp(r_t a) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t
//
// An item is one head of one row: its state [K, V] stays in the fast memory while time passes. The
// backward pass makes the states of EVERY steps again from the one kept before them. Where neither
// r nor a varies along V a row of the state has one decay; else each number has its own, and their
// exponentials are most of the work.

#include <algorithm>
#include <cstdint>

#include "numbers.h"
#include "threads.h"

// What Python hands over; mirrored in decaying_scan_cpu.py. All arrays are contiguous.
struct ScanCall {
  int64_t threads, rows, time, heads, keys, values;   // N = M B, T, H, K, V
  int64_t every, models;                              // steps between kept states; M
  int64_t rate_keys, rate_values;                     // sizes of r: K or 1, V or 1
  int64_t a_heads, a_keys, a_values;                  // of a: H or 1, K or 1, V or 1
  const float *q, *k, *v, *rate, *a;                  // [N,T,H,K] twice, [N,T,H,V], r, [M,...]
  const float* initial;                               // state before the first step, [N, H, K, V]
  float *out, *last, *kept;                           // [N,T,H,V]; as initial; [N, T/every up, H, K, V]
  const float *grad, *grad_last;                      // of out, null: forward; of last
  float *dq, *dk, *dv, *drate;                        // as q, k, v, rate
  float *da, *dinitial;                               // [N, H, a_keys, a_values], to be summed; as initial
  float* workspace;                                   // as many bytes as scan_workspace says
  void* parallel;                                     // GOMP_parallel, or null
};

namespace {

// One head of one row. RATE and A: whether r and a vary along V.
template <bool RATE, bool A> class Item {
  const ScanCall& c;
  const int64_t head, size, steps, decays;  // numbers in a state, kept states, decays of a step
  const float *q, *k, *v, *rate, *a;
  float* kept;
  float* const scratch;
  int64_t row;

  int64_t state_at() const { return (row * c.heads + head) * size; }
  int64_t at(int64_t t) const { return (row * c.time + t) * c.heads + head; }
  const float* rate_at(int64_t t, int64_t key) const {
    return rate + (at(t) * c.rate_keys + (c.rate_keys > 1 ? key : 0)) * c.rate_values;
  }
  int64_t a_row(int64_t key) const { return (c.a_keys > 1 ? key : 0) * c.a_values; }
  float* kept_at(int64_t block) const {
    return kept + ((row * steps + block) * c.heads + head) * size;
  }

  // exp(r_t a): a number for each of the state's, or one for each of its rows.
  void decay(int64_t t, float* out) const {
    for (int64_t key = 0; key < c.keys; ++key) {
      const float *r = rate_at(t, key), *e = a + a_row(key);
      if (!RATE && !A) {
        out[key] = exponential(r[0] * e[0]);
        continue;
      }
      float* to = out + key * c.values;
#pragma omp simd
      for (int64_t i = 0; i < c.values; ++i)
        to[i] = exponential(r[RATE ? i : 0] * e[A ? i : 0]);
    }
  }

  // to = decay * from + k v^T; `to` may be `from`.
  void step(int64_t t, const float* decay, const float* from, float* to) const {
    const float *keys = k + at(t) * c.keys, *values = v + at(t) * c.values;
    for (int64_t key = 0; key < c.keys; ++key) {
      const float *d = decay + (RATE || A ? key * c.values : key), *s = from + key * c.values;
      float* next = to + key * c.values;
      const float factor = keys[key];
#pragma omp simd
      for (int64_t i = 0; i < c.values; ++i)
        next[i] = d[RATE || A ? i : 0] * s[i] + factor * values[i];
    }
  }

  void read(int64_t t, const float* state) const {
    float* out = c.out + at(t) * c.values;
    std::fill(out, out + c.values, 0.0f);
    for (int64_t key = 0; key < c.keys; ++key) {
      const float query = q[at(t) * c.keys + key], *s = state + key * c.values;
#pragma omp simd
      for (int64_t i = 0; i < c.values; ++i) out[i] += query * s[i];
    }
  }

  // The gradients of step t from that of its state, `flow`, which becomes that of the one before.
  void step_back(int64_t t, const float* decay, const float* before, const float* after,
                 float* flow, float* da) const {
    const float *grad = c.grad + at(t) * c.values, *values = v + at(t) * c.values;
    float* dv = c.dv + at(t) * c.values;
    std::fill(dv, dv + c.values, 0.0f);
    for (int64_t key = 0; key < c.keys; ++key) {
      const int64_t number = at(t) * c.keys + key, offset = key * c.values;
      const float query = q[number], factor = k[number];
      const float *d = decay + (RATE || A ? offset : key), *s = before + offset, *next = after + offset;
      const float *r = rate_at(t, key), *e = a + a_row(key);
      float *f = flow + offset, *dr = c.drate + (r - rate), *de = da + a_row(key);
      float dq = 0, dk = 0, total = 0, rate_total = 0, a_total = 0;
#pragma omp simd reduction(+ : dq, dk, total, rate_total, a_total)
      for (int64_t i = 0; i < c.values; ++i) {
        const float here = f[i] + query * grad[i];
        dq += next[i] * grad[i];
        dk += here * values[i];
        dv[i] += here * factor;
        f[i] = here * d[RATE || A ? i : 0];
        const float exponent = f[i] * s[i];
        if (!RATE && !A) total += exponent;
        if (RATE) dr[i] += exponent * e[A ? i : 0];
        else if (A) rate_total += exponent * e[i];
        if (A) de[i] += exponent * r[RATE ? i : 0];
        else if (RATE) a_total += exponent * r[i];
      }
      c.dq[number] = dq;
      c.dk[number] = dk;
      if (!RATE) dr[0] += A ? rate_total : total * e[0];
      if (!A) de[0] += RATE ? a_total : total * r[0];
    }
  }

 public:
  Item(const ScanCall& call, int64_t item, float* buffer)
      : c(call), head(item % c.heads), size(c.keys * c.values),
        steps((c.time + c.every - 1) / c.every), decays(RATE || A ? size : c.keys), q(c.q), k(c.k),
        v(c.v), rate(c.rate), kept(c.kept), scratch(buffer), row(item / c.heads) {
    const int64_t model = row / (c.rows / c.models);
    a = c.a + (model * c.a_heads + (c.a_heads > 1 ? head : 0)) * c.a_keys * c.a_values;
  }

  void forward() const {
    float *state = scratch, *now = scratch + size;
    std::copy(c.initial + state_at(), c.initial + state_at() + size, state);
    for (int64_t t = 0; t < c.time; ++t) {
      if (t % c.every == 0) std::copy(state, state + size, kept_at(t / c.every));
      decay(t, now);
      step(t, now, state, state);
      read(t, state);
    }
    std::copy(state, state + size, c.last + state_at());
  }

  void backward() const {
    float *flow = scratch, *states = flow + size, *now = states + (c.every + 1) * size;
    float* da = c.da + (row * c.heads + head) * c.a_keys * c.a_values;
    std::copy(c.grad_last + state_at(), c.grad_last + state_at() + size, flow);
    for (int64_t block = steps - 1; block >= 0; --block) {
      const int64_t start = block * c.every, count = std::min(c.every, c.time - start);
      std::copy(kept_at(block), kept_at(block) + size, states);
      for (int64_t i = 0; i < count; ++i) {
        decay(start + i, now + i * decays);
        step(start + i, now + i * decays, states + i * size, states + (i + 1) * size);
      }
      for (int64_t i = count - 1; i >= 0; --i)
        step_back(start + i, now + i * decays, states + i * size, states + (i + 1) * size, flow, da);
    }
    std::copy(flow, flow + size, c.dinitial + state_at());
  }
};

template <bool RATE, bool A> void run(const ScanCall& c, int64_t scratch) {
  for_each(c.rows * c.heads, c.threads, c.parallel, [&](int64_t item, int64_t thread) {
    const Item<RATE, A> work(c, item, c.workspace + thread * scratch);
    if (c.grad) work.backward();
    else work.forward();
  });
}

}  // namespace

// Bytes that all threads need.
extern "C" int64_t scan_workspace(const ScanCall* c) {
  return c->threads * c->keys * c->values * (c->grad ? 2 * c->every + 2 : 2) * sizeof(float);
}

extern "C" void scan_run(const ScanCall* c) {
  const int64_t scratch = scan_workspace(c) / (c->threads * sizeof(float));
  const bool rate = c->rate_values > 1, a = c->a_values > 1;
  if (rate && a) run<true, true>(*c, scratch);
  else if (rate) run<true, false>(*c, scratch);
  else if (a) run<false, true>(*c, scratch);
  else run<false, false>(*c, scratch);
}

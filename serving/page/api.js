// Asks the API that serves this page, and follows a load's events.

const KEY = "longshore-token"; // of this tab's storage

export class Refused extends Error {} // the token is missing, or not the service's

export class Later extends Error { // asked too often
  constructor(message, seconds) {
    super(message);
    this.seconds = seconds;
  }
}

export const hasToken = () => Boolean(sessionStorage.getItem(KEY));
export const useToken = (token) => sessionStorage.setItem(KEY, token);

/** The answer to a path, relative to this page. Throws Refused, Later, Error with the problem's words. */
export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the service does not answer"); // each browser says it its way
  });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  const said = problem.detail || `${answer.status} ${answer.statusText}`;
  if (answer.status === 401) throw new Refused(said);
  if (answer.status === 429) throw new Later(said, Number(answer.headers.get("retry-after")) || 5);
  throw new Error(problem.hint ? `${said} (${problem.hint})` : said);
}

/** One event of the wire: { id, event, data }. */
function parse(part) {
  const fields = {};
  for (const line of part.split("\n")) {
    const at = line.indexOf(":");
    if (at > 0) fields[line.slice(0, at)] = line.slice(at + 1).replace(/^ /, "");
  }
  return fields;
}

/** Calls `tell` with each numbered event until the load is over or `signal` aborts. EventSource sends no token. */
export async function follow(model, signal, tell) {
  let after = 0;
  while (!signal.aborted) {
    let pause = 2;
    try {
      const answer = await ask(`v1/loads/${encodeURIComponent(model)}/events?after=${after}`, { signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let left = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (left + value).split("\n\n");
        left = parts.pop();
        for (const fields of parts.map(parse)) {
          if (fields.id) { after = Number(fields.id); tell(JSON.parse(fields.data)); }
          if (fields.event === "end") return;
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) throw error;
      if (error instanceof Later) pause = error.seconds;
    }
    await new Promise((done) => { setTimeout(done, 1000 * pause); });
  }
}

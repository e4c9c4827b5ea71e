// The server's API as the page asks it.

export class ServerError extends Error {
  // status: of HTTP; 0 where there is none
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  if (!/^[\x21-\x7e]*$/.test(key)) throw new ServerError("The API key has characters that no key has.", 401);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError("The server cannot be reached.");
  }
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not in the API's form: a proxy's own page, perhaps
  }
  return new ServerError(message, response.status);
}

export async function getInfo(key) {
  const response = await reach("info", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// The data of each server-sent event, however the network cuts the bytes.
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (held + value).split(/\r?\n\r?\n/);
      held = events.pop();
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// The chunks of a streamed answer. Throws ServerError for a refusal, an error within the stream, and a stream that ends
// before it said so.
export async function* ask(path, body, key, signal) {
  const response = await reach(path, {
    method: "POST",
    headers: { ...headers(key), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
    throw new ServerError("The connection broke off.");
  }
  throw new ServerError("The connection ended before the answer did.");
}

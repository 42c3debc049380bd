// The due requests inside the page as typed arrays, for whoever asks; see embedded_rows.py.
"use strict";
window.slobench = (() => {
  const arrays = { f8: Float64Array, f4: Float32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

  async function inflated(data) {
    const deflated = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
    const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  async function unpacked({ type, data }) {
    const planes = await inflated(data);
    const size = arrays[type].BYTES_PER_ELEMENT;
    const n = planes.length / size;
    const bytes = new Uint8Array(planes.length);
    for (let plane = 0; plane < size; plane++) {
      for (let k = 0; k < n; k++) bytes[k * size + plane] = planes[plane * n + k];
    }
    return new arrays[type](bytes.buffer);
  }

  async function table(held) {
    const names = Object.keys(held.columns);
    const columns = await Promise.all(names.map((name) => unpacked(held.columns[name])));
    return Object.fromEntries(names.map((name, k) => [name, columns[k]]));
  }

  const element = document.getElementById("rows");
  const held = element && JSON.parse(element.textContent);
  const three = (value) => String(Number(value.toPrecision(3)));
  return {
    held,
    three,
    columns: held && table(held),
    sentences: async () => held.why ? new TextDecoder().decode(await inflated(held.why)).split("\n") : [],
  };
})();

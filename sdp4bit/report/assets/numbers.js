// How numbers are written, and where axes have their marks.

const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    return `${trimmed(mantissa)}e${Number(exponent)}`;
  }
  return trimmed(value.toPrecision(digits));
}

function bytes(value, digits = 3) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? trimmed(value.toPrecision(digits)) : Math.round(value)} ${units[unit]}`;
}

function format(value, unit) {
  if (value === null) return "not finite";
  if (unit === "loss") return value.toFixed(4);
  if (unit === "difference") return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
  if (unit === "bytes") return bytes(value, 4);
  if (unit === "seconds") return value >= 1 ? `${number(value)} s` : `${number(1000 * value)} ms`;
  return number(value);
}

function tick(value, unit) {
  if (unit === "bytes") return bytes(value);
  if (unit === "seconds") return value === 0 ? "0" : value >= 1 ? `${number(value, 3)} s` : `${number(1000 * value, 3)} ms`;
  return number(value);
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const first = Math.ceil(low / step - 1e-9);
  const steps = Math.min(4 * count, Math.floor((high - first * step) / step + 1e-9));
  const found = [];
  for (let i = 0; i <= steps; i += 1) found.push(Number(((first + i) * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of Math.log10(high / low) > 3 ? [1] : [1, 2, 5]) {
      const value = Number(`${factor}e${power}`);
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

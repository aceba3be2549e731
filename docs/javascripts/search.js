// The theme's search matches each word as the beginning of a word, so that "norm" finds "normal" first, and "in" half of
// the pages. Here a word counts most where it stands alone, and words that say nothing are left out.
const sayNothing = new Set(
  `a about all am an and another any are as at be but by can could do does for from get had has have how i if in into is it
  its just me my no not of on one or other our out should so some than that the their them then there they this to too use
  used using was we what when where which while why will with work works would you your`.split(/\s+/)
)

function prepared(query) {
  if (query.includes('"')) return query
  const words = query.replace(/[?!,;()[\]{}'`]/g, " ").trim().split(/\s+/).map(word => word.replace(/^[-+]+/, ""))
  const telling = words.filter(word => word && !sayNothing.has(word.toLowerCase()))
  return (telling.length ? telling : words).map(word => `${word}^9 ${word}`).join(" ")
}

window.Worker = class extends window.Worker {
  postMessage(message) {
    const isQuery = message.type === 2 // The theme's messages: 0 gives the index, 2 a query.
    super.postMessage(isQuery ? { ...message, data: prepared(message.data) } : message)
  }
}

// SPDX-License-Identifier: Apache-2.0
// The same program as ../floor/main.go: it plays a script of kernel calls from stdin. See ../script.go.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NETNS = 1, ENTER, SOCKET, SEND, CREATE, REMOVE, READ, PRINT };
enum { NETNS_FD = 100 };

struct step { uint32_t op, arg, len; char data[]; };

static char script[64 << 10], received[32 << 10];

static int open_netns(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? -1 : dup3(fd, NETNS_FD, O_CLOEXEC);
}

static int create(const char *path, size_t len)
{
	const char *content = path + strlen(path) + 1;
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0 || write(fd, content, len - (content - path)) < 0)
		return -1;
	return close(fd);
}

static int read_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, received, sizeof received) < 0)
		return -1;
	return close(fd);
}

static int exchange(int fd, const struct step *s)
{
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK };
	int answers = s->arg;
	if (sendto(fd, s->data, s->len, 0, (void *)&kernel, sizeof kernel) < 0)
		return -1;
	while (answers > 0) {
		int n = recv(fd, received, sizeof received, 0);
		if (n < 0)
			return -1;
		for (struct nlmsghdr *h = (void *)received; NLMSG_OK(h, n); h = NLMSG_NEXT(h, n)) {
			if (h->nlmsg_type != NLMSG_ERROR && h->nlmsg_type != NLMSG_DONE)
				continue;
			int code = *(int *)NLMSG_DATA(h);
			if (code < 0) {
				errno = -code;
				return -1;
			}
			answers--;
		}
	}
	return 0;
}

int main(void)
{
	static char data[16 << 10];
	size_t size = 0;
	ssize_t n;
	int sock = -1, rc = 0;
	while ((n = read(0, script + size, sizeof script - size)) > 0)
		size += n;
	for (size_t at = 0; at + sizeof(struct step) <= size && rc >= 0;) {
		const struct step *s = (void *)(script + at);
		if (s->len >= sizeof data)
			return 2;
		memcpy(data, s->data, s->len);
		data[s->len] = 0;
		switch (s->op) {
		case NETNS: rc = open_netns(data); break;
		case ENTER: rc = setns(NETNS_FD, CLONE_NEWNET); break;
		case SOCKET:
			if (sock >= 0)
				close(sock);
			rc = sock = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, s->arg);
			break;
		case SEND: rc = exchange(sock, s); break;
		case CREATE: rc = create(data, s->len); break;
		case REMOVE: rc = unlink(data); break;
		case READ: rc = read_file(data); break;
		case PRINT: rc = write(1, data, s->len); break;
		default: errno = ENOSYS; rc = -1;
		}
		if (rc < 0)
			fprintf(stderr, "op %u arg %u: %s\n", s->op, s->arg, strerror(errno));
		at += sizeof(struct step) + ((s->len + 3) & ~3u);
	}
	return rc < 0;
}
